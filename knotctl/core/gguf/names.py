"""Tensor names: GGUF's, the knot's, and the phase and place in which each one is used. The only module that knows them.

Source: ggml's GGUF naming (`blk.N.attn_q.weight`); DESIGN decisions 1 and 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from knotctl.core.errors import UsageError

PHASES: Final = ("attn", "ffn_gate", "ffn_up", "ffn_down")

TOKEN_EMBD: Final = "token_embd.weight"
ROPE_FREQS: Final = "rope_freqs.weight"
OUTPUT_NORM: Final = "output_norm.weight"
OUTPUT: Final = "output.weight"

# Phase -> parts in the order of use; a `?` marks what a model may lack.
_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "attn": (
        "attn_norm.weight",
        "attn_q.weight", "attn_q.bias?",
        "attn_k.weight", "attn_k.bias?",
        "attn_v.weight", "attn_v.bias?",
        "attn_q_norm.weight?", "attn_k_norm.weight?",
        "attn_output.weight", "attn_output.bias?",
    ),
    "ffn_gate": ("ffn_norm.weight", "ffn_gate.weight"),
    "ffn_up": ("ffn_up.weight",),
    "ffn_down": ("ffn_down.weight",),
}  # fmt: skip
_PLACE: Final = {part.rstrip("?"): i for i, part in enumerate(p for phase in PHASES for p in _PARTS[phase])}
_PHASE_OF: Final = {part.rstrip("?"): phase for phase in PHASES for part in _PARTS[phase]}
# Architecture -> parts of every layer without which it is another model; further ones are required of all.
ARCHITECTURES: Final[dict[str, tuple[str, ...]]] = {
    "llama": (),
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}

# Payload order of what belongs to no layer; everything unknown lies between rope_freqs and the first layer.
_FIRST: Final = {TOKEN_EMBD: 0, ROPE_FREQS: 1}
_LAST: Final = {OUTPUT_NORM: 4, OUTPUT: 5}
_UNKNOWN_GLOBAL, _LAYER = 2, 3

# A leading zero would give one layer two names; five digits are beyond every model.
_LAYER_NAME: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)", re.DOTALL | re.ASCII)


class PhaseTensor(NamedTuple):
    """One tensor of a phase: its part (`attn_q_weight`), its two full names, and whether every model has it."""

    part: str
    gguf: str
    knot: str
    required: bool


def knot_name(gguf_name: str) -> str:
    """Return the knot's name of a GGUF tensor: dots become underscores."""
    return gguf_name.replace(".", "_")


def split_layer(gguf_name: str) -> tuple[int, str] | None:
    """Return (layer, part) of `blk.7.ffn_up.weight`, None for a tensor of no layer."""
    m = _LAYER_NAME.fullmatch(gguf_name)
    return (int(m[1]), m[2]) if m else None


def phase_of(gguf_name: str) -> str | None:
    """Return the phase that uses a tensor, None for tensors of no layer and parts we do not know."""
    at = split_layer(gguf_name)
    return _PHASE_OF.get(at[1]) if at else None


def layer_tensors(phase: str, layer: int) -> tuple[PhaseTensor, ...]:
    """Return the tensors of one phase of one layer in the order of use, which is their order in the payload."""
    if phase not in _PARTS:
        raise UsageError("bad-phase", f"phase {phase!r}: expected one of {', '.join(PHASES)}")
    tensors = []
    for spec in _PARTS[phase]:
        part = spec.rstrip("?")
        name = f"blk.{layer}.{part}"
        tensors.append(PhaseTensor(knot_name(part), name, knot_name(name), not spec.endswith("?")))
    return tuple(tensors)


def order_key(gguf_name: str) -> tuple[int, int, int, str]:
    """Return the sort key that puts tensors into payload order, so that a phase is one range of bytes.

    Unknown parts of a layer come at its end, unknown tensors of no layer before the first layer, each by name.
    """
    at = split_layer(gguf_name)
    if at is not None:
        return (_LAYER, at[0], _PLACE.get(at[1], len(_PLACE)), gguf_name)
    return (_FIRST.get(gguf_name, _LAST.get(gguf_name, _UNKNOWN_GLOBAL)), 0, 0, gguf_name)


def required_tensors(architecture: str, n_layers: int) -> Iterator[str]:
    """Yield the GGUF names that a model of an architecture we know must have, in payload order."""
    yield TOKEN_EMBD
    extra = ARCHITECTURES[architecture]
    for layer in range(n_layers):
        for phase in PHASES:
            for t in layer_tensors(phase, layer):
                if t.required or t.gguf.removeprefix(f"blk.{layer}.") in extra:
                    yield t.gguf
    yield OUTPUT_NORM
