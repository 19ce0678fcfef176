"""What the planner needs to know of a knot: bytes and work of each layer, embedding and head, from the header alone.

Source: CONTRACT section 1; core/model/budget.py for what a station holds beside weights and KV.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

from knotctl.core.cluster.layers import LayerSizes, ModelLayers, sums
from knotctl.core.cluster.quantizations import CATALOGUE, canonical
from knotctl.core.errors import ModelError
from knotctl.core.gguf.names import OUTPUT, OUTPUT_NORM, TOKEN_EMBD, knot_name
from knotctl.core.knot.config import KnotConfig
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.layout import DIGESTS_TENSOR, TOKENIZER_TENSOR

_LAYER = re.compile(r"blk_(0|[1-9][0-9]{0,4})_.+", re.DOTALL | re.ASCII)
_EMBEDDING, _OUTPUT = knot_name(TOKEN_EMBD), knot_name(OUTPUT)
# A prefill chunk as stations cut it; beside it the program with its kernels, and their scratch on up to 32 threads.
_CHUNK_TOKENS = 512
_PROGRAM_BYTES = 56 << 20


def model_layers(header: KnotHeader, name: str) -> ModelLayers:
    """Return a knot as the planner sees it. `name` is what nodes and presets call the model.

    Units: bytes as stored at the knot's own quantisation, which is the type that most of its layers' bytes are of; at
    another one, matrices at that and everything else as stored.
    Raises: ModelError no-layers.
    """
    config = header.config
    layers: list[list[TensorEntry]] = [[] for _ in range(config.n_layers)]
    first: list[TensorEntry] = []
    last: list[TensorEntry] = []
    everywhere: list[TensorEntry] = []
    for t in header.tensors:
        at = _LAYER.fullmatch(t.name)
        if at is not None and int(at[1]) < config.n_layers:
            layers[int(at[1])].append(t)
        elif t.name in (_EMBEDDING, TOKENIZER_TENSOR):
            first.append(t)
        elif t.name in (_OUTPUT, knot_name(OUTPUT_NORM)):
            last.append(t)
        elif t.name != DIGESTS_TENSOR:
            everywhere.append(t)
    if not all(layers):
        raise ModelError("no-layers", f"{name}: the header states no layers that could be planned")
    embedding = [t for t in first if t.name == _EMBEDDING]
    tied = embedding if not any(t.name == _OUTPUT for t in last) else []
    head_work = _work([*(t for t in last if t.name == _OUTPUT), *tied])
    native = _most_bytes(t for layer in layers for t in layer)

    @cache
    def sizes_at(quantization: str) -> LayerSizes | None:
        if quantization != native and quantization not in CATALOGUE:
            return None

        def size(tensors: Iterable[TensorEntry]) -> int:
            if quantization == native:
                return sum(t.length for t in tensors)
            return sum(CATALOGUE[quantization].bytes_of(_elements(t)) if _is_matrix(t) else t.length for t in tensors)

        return LayerSizes.of(quantization, [size(t) for t in layers], size(first), size([*last, *tied]), size(tied))

    return ModelLayers(
        name=name,
        work=sums([_work(t) for t in layers]),
        head_work=head_work,
        # What a decoded token reads: rows of an embedding that is no output matrix are not among it.
        parameters=max(1, sum(map(_work, layers)) + head_work),
        hidden_size=config.hidden_size,
        activation_bytes=station_bytes(config) + sum(t.length for t in everywhere),
        kv_token_bytes=2 * config.n_kv_heads * config.head_dim * 4,
        context_length=config.context_length,
        native=native,
        quantizations=(native,),
        sizes_at=sizes_at,
    )


def station_bytes(config: KnotConfig) -> int:
    """Return what a station holds beside weights and KV at a prompt's longest chunk, never less than its memory plan.

    The planner may not import what computes, so this restates core/model/budget.py; a test compares the two.
    """
    hidden, ffn = config.hidden_size, config.ffn_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    attention = 4 * (3 * hidden + 2 * q + 4 * kv) + 2 * (hidden + q)
    feed_forward = 4 * (3 * hidden + 2 * ffn) + 2 * (hidden + ffn)
    frames = 2 * hidden * 4
    return _CHUNK_TOKENS * (max(attention, feed_forward) + frames) + config.vocab_size * 4 + _PROGRAM_BYTES


def _most_bytes(tensors: Iterable[TensorEntry]) -> str:
    found: Counter[str] = Counter()
    for t in tensors:
        found[t.qtype.name] += t.length
    return canonical(max(found, key=lambda name: (found[name], name)))


def _is_matrix(t: TensorEntry) -> bool:
    return len(t.shape) > 1 and t.name != TOKENIZER_TENSOR


def _elements(t: TensorEntry) -> int:
    count = 1
    for n in t.shape:
        count *= n
    return count


def _work(tensors: Iterable[TensorEntry]) -> int:
    return sum(_elements(t) for t in tensors if _is_matrix(t))
