"""A model by a preset: a JSON file that says how many bytes a layer takes at each quantisation.

Source: man knot-cluster(7), PRESETS.
"""

from __future__ import annotations

from typing import Any

from knotctl.core.cluster.fields import Fields, parse_document
from knotctl.core.cluster.layers import MAX_BYTES, MAX_LAYERS, LayerSizes, ModelLayers, sums
from knotctl.core.cluster.quantizations import CATALOGUE, canonical
from knotctl.core.cluster.speed import parameters_in
from knotctl.core.errors import printable

MAX_PRESET_BYTES = 16 << 20
FIELDS = (
    "model", "n_layers", "bytes_per_layer", "embedding_bytes", "head_bytes", "parameters", "hidden_size",
    "activation_bytes", "kv_bytes_per_token", "context_length",
)  # fmt: skip
# What activations of a prefill chunk take, in float32 vectors of the residual's width a token: the widest phase is the
# feed-forward one, about 4 widths each way.
_CHUNK_TOKENS, _VECTORS = 512, 12


def parse_preset(data: bytes, name: str = "preset") -> ModelLayers:
    """Return the model that a preset describes; `name` is the file's, for messages.

    Raises: FormatError bad-json, duplicate-key, bad-preset.
    """
    return preset_of(parse_document(data, name), name)


def preset_of(document: object, name: str) -> ModelLayers:
    """Return the model of a preset's JSON object. Raises: FormatError bad-preset."""
    fields = Fields(document, name, "bad-preset")
    model = fields.text("model")
    n_layers = fields.integer("n_layers", 1, MAX_LAYERS)
    layers = {q: _layers(fields, q, value, n_layers) for q, value in _by_name(fields, "bytes_per_layer").items()}
    if not layers:
        fields.refuse("bytes_per_layer: expected at least one quantisation")
    embedding = _one_or_each(fields, "embedding_bytes", layers)
    head = _one_or_each(fields, "head_bytes", layers)
    first = next(iter(layers))
    parameters = fields.integer("parameters", 1, MAX_BYTES, parameters_in(model) or 0)
    hidden = fields.integer("hidden_size", 1, 1 << 20, 0)
    sizes = {q: LayerSizes.of(q, layers[q], embedding[q], head[q]) for q in layers}
    found = ModelLayers(
        name=model,
        # Bytes at one quantisation stand for the work: what a token's time is shared out by is what is read for it.
        work=sums(layers[first]),
        head_work=head[first],
        parameters=parameters or _parameters(sizes[first]),
        hidden_size=hidden,
        activation_bytes=fields.integer("activation_bytes", 0, MAX_BYTES, _CHUNK_TOKENS * hidden * 4 * _VECTORS),
        kv_token_bytes=fields.integer("kv_bytes_per_token", 0, 1 << 30, 0),
        context_length=fields.integer("context_length", 0, 1 << 30, 0),
        native=None,
        quantizations=tuple(sizes),
        sizes_at=sizes.get,
    )
    fields.done(FIELDS)
    return found


def _by_name(fields: Fields, field: str) -> dict[str, Any]:
    """The object of a field with canonical quantisations as keys."""
    found: dict[str, Any] = {}
    for key, value in fields.mapping(field).items():
        if not 0 < len(key) <= 32 or not key.isprintable() or (name := canonical(key)) in found:
            fields.refuse(f"{field}: expected quantisations, each once, found {printable(key, 40)!r}")
        found[name] = value
    return found


def _layers(fields: Fields, quantization: str, value: object, n_layers: int) -> list[int]:
    sizes: list[Any] = value if isinstance(value, list) else [value] * n_layers
    if len(sizes) != n_layers or not all(type(n) is int and 0 < n <= MAX_BYTES for n in sizes):
        fields.refuse(
            f"bytes_per_layer: {printable(quantization, 40)}: expected bytes from 1 to {MAX_BYTES:,}, "
            f"or a list of {n_layers:,} such"
        )
    return sizes


def _one_or_each(fields: Fields, field: str, quantizations: dict[str, list[int]]) -> dict[str, int]:
    """A number of bytes for every quantisation, or an object with one for each."""
    if not fields.has(field):
        fields.integer(field, 0, 0, 0)
        return dict.fromkeys(quantizations, 0)
    value = fields.take(field)
    if type(value) is dict:
        value = {canonical(k): v for k, v in value.items()}
    sizes = value if type(value) is dict else dict.fromkeys(quantizations, value)
    for q in quantizations:
        if type(sizes.get(q)) is not int or not 0 <= sizes[q] <= MAX_BYTES:
            fields.refuse(f"{field}: expected bytes from 0 to {MAX_BYTES:,}, or an object with such for {q}")
    return {q: sizes[q] for q in quantizations}


def _parameters(sizes: LayerSizes) -> int:
    known = CATALOGUE.get(sizes.quantization, CATALOGUE["nf4"])
    return max(1, sizes.total * known.block // known.block_bytes)
