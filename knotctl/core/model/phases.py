"""The phases of a span of layers: which tensors each needs, all of them checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from knotctl.core.errors import ModelError
from knotctl.core.gguf.names import PHASES, layer_tensors
from knotctl.core.knot.reader import Knot
from knotctl.core.model.config import ModelConfig
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.residency import Phase
from knotctl.core.tensor.views import TensorView, view

_SHAPES: dict[str, Callable[[ModelConfig], tuple[int, ...]]] = {
    "attn_norm_weight": lambda c: (c.hidden_size,),
    "attn_q_weight": lambda c: (c.q_size, c.hidden_size),
    "attn_q_bias": lambda c: (c.q_size,),
    "attn_k_weight": lambda c: (c.kv_size, c.hidden_size),
    "attn_k_bias": lambda c: (c.kv_size,),
    "attn_v_weight": lambda c: (c.kv_size, c.hidden_size),
    "attn_v_bias": lambda c: (c.kv_size,),
    "attn_q_norm_weight": lambda c: (c.head_dim,),
    "attn_k_norm_weight": lambda c: (c.head_dim,),
    "attn_output_weight": lambda c: (c.hidden_size, c.q_size),
    "attn_output_bias": lambda c: (c.hidden_size,),
    "ffn_norm_weight": lambda c: (c.hidden_size,),
    "ffn_gate_weight": lambda c: (c.ffn_size, c.hidden_size),
    "ffn_up_weight": lambda c: (c.ffn_size, c.hidden_size),
    "ffn_down_weight": lambda c: (c.hidden_size, c.ffn_size),
}
# Tensors without which an architecture is another model: their absence is not an option taken.
_REQUIRED = {
    "qwen2": {"attn_q_bias", "attn_k_bias", "attn_v_bias"},
    "qwen3": {"attn_q_norm_weight", "attn_k_norm_weight"},
}
# Parts that exist in the format but that an architecture does not compute with.
_UNUSED = {arch: {"attn_q_norm_weight", "attn_k_norm_weight"} for arch in ("llama", "qwen2")}


@dataclass(frozen=True, slots=True)
class LayerPhases:
    """The four phases of a layer, in the order of use."""

    index: int
    attn: Phase
    ffn_gate: Phase
    ffn_up: Phase
    ffn_down: Phase

    @property
    def all(self) -> tuple[Phase, ...]:
        """The four, in that order."""
        return self.attn, self.ffn_gate, self.ffn_up, self.ffn_down


def layer_phases(knot: Knot, config: ModelConfig, span: LayerSpan) -> list[LayerPhases]:
    """Return the phases of the layers of a span.

    Raises: ModelError missing-tensor that names phase, layer and tensor; wrong-shape; unsupported-type;
        unsupported-feature where a layer holds a tensor that we would not compute with.
    """
    if span.end > config.n_layers:
        raise ModelError("bad-span", f"{knot.source.name}: layers {span}: the model has {config.n_layers}")
    layers = [
        LayerPhases(layer, *(_phase(knot, config, name, layer) for name in PHASES))
        for layer in range(span.start, span.end)
    ]
    _refuse_unused(knot, config, layers)
    return layers


def head_phase(knot: Knot, config: ModelConfig) -> Phase:
    """Return the output phase: the last norm and the output matrix (the embedding table where they are tied).

    Of the matrix only the vocabulary's rows: those of padding have no logits.
    """
    name = "token_embd_weight" if config.tied_embedding else "output_weight"
    norm = _view(knot, "output_norm_weight", (config.hidden_size,), "output", "the last layer")
    matrix = _view(knot, name, (config.embedding_rows, config.hidden_size), "output", "the last layer")
    used = replace(matrix, rows=config.vocab_size, range=matrix.row_range(0, config.vocab_size))
    return Phase(None, "output", {"output_norm_weight": norm, "output_weight": used})


def rope_factors(knot: Knot, config: ModelConfig) -> TensorView | None:
    """Return the view of the model's own rope factors [rope_dim / 2], None where it has none."""
    return view(knot, "rope_freqs_weight", (config.rope_dim // 2,)) if knot.has("rope_freqs_weight") else None


def _phase(knot: Knot, config: ModelConfig, name: str, layer: int) -> Phase:
    required = _REQUIRED.get(config.architecture, ())
    tensors = {
        t.part: _view(knot, t.knot, _SHAPES[t.part](config), name, f"layer {layer}")
        for t in layer_tensors(name, layer)
        if t.required or t.part in required or knot.has(t.knot)
    }
    return Phase(layer, name, tensors)


def _refuse_unused(knot: Knot, config: ModelConfig, layers: list[LayerPhases]) -> None:
    """Raise where a layer holds a tensor that would not be computed with: the result would be another model's."""
    unused = _UNUSED.get(config.architecture, set())
    used = {
        t.name for layer in layers for phase in layer.all for role, t in phase.tensors.items() if role not in unused
    }
    mine = {str(layer.index) for layer in layers}
    for entry in knot.header.tensors:
        parts = entry.name.split("_", 2)
        if parts[0] == "blk" and len(parts) == 3 and parts[1] in mine and entry.name not in used:
            raise ModelError(
                "unsupported-feature",
                f"{knot.source.name}: tensor {entry.name}: architecture {config.architecture} is not known to use it, "
                "so the model would be computed wrongly",
            )


def _view(knot: Knot, name: str, shape: tuple[int, ...], phase: str, place: str) -> TensorView:
    if not knot.has(name):
        raise ModelError(
            "missing-tensor",
            f"{knot.source.name}: phase {phase} of {place}: tensor {name} is missing",
            hint="the knot is not whole: encode it again from its GGUF",
        )
    return view(knot, name, shape)
