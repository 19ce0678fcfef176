"""What the forward pass needs to know of a model, checked once: after this nobody defaults and nobody re-checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from knotctl.core.errors import ModelError
from knotctl.core.knot.config import KnotConfig

# Architecture -> whether rope turns neighbouring pairs (0,1), (2,3)… (llama's GGUFs) or halves (i, i + D/2).
INTERLEAVED_ROPE = {"llama": True, "qwen2": False, "qwen3": False}

# GGUF keys (after the architecture's prefix) that change the computation, with the value that leaves it as we do it.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "rope.scaling.type": ("none", "linear"),
    "attention.causal": (True,),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder that we can run."""

    architecture: str
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    embedding_rows: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_dim: int
    rope_scale: float
    tied_embedding: bool

    @property
    def interleaved_rope(self) -> bool:
        """Whether rope turns neighbouring pairs; halves otherwise."""
        return INTERLEAVED_ROPE[self.architecture]

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of all KV heads."""
        return self.n_kv_heads * self.head_dim

    def inverse_frequencies(self, factors: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Return the rope angle of each pair per position, divided by a model's `rope_freqs` factors where it has them.

        Shapes: float32 [rope_dim / 2]. Source: Su et al. 2021 (RoFormer), section 3.2.2; Llama 3.1 for the factors.
        """
        pairs = np.arange(0, self.rope_dim, 2, dtype=np.float64)
        frequencies = self.rope_scale * self.rope_theta ** (-pairs / self.rope_dim)
        if factors is not None:
            frequencies = frequencies / factors.astype(np.float64)
        return frequencies.astype(np.float32)


def model_config(name: str, knot: KnotConfig) -> ModelConfig:
    """Return the configuration to run a knot's model with; `name` is what messages call the knot.

    Raises: ModelError unsupported-architecture, unsupported-feature or bad-config.
    """
    arch = knot.architecture
    if arch not in INTERLEAVED_ROPE:
        raise ModelError(
            "unsupported-architecture",
            f"{name}: architecture {arch!r} cannot be run; expected one of {' '.join(INTERLEAVED_ROPE)}",
        )
    for key, neutral in _NEUTRAL.items():
        value = knot.gguf.get(f"{arch}.{key}")
        if value is not None and value not in neutral:
            raise ModelError("unsupported-feature", f"{name}: {arch}.{key} = {value!r} is not supported")
    key_length, value_length = (knot.gguf.get(f"{arch}.attention.{k}_length", knot.head_dim) for k in ("key", "value"))
    sizes = (knot.hidden_size, knot.n_layers, knot.n_heads, knot.n_kv_heads, knot.head_dim, knot.ffn_size,
             knot.vocab_size, knot.embedding_rows, knot.context_length, knot.rope_dim)  # fmt: skip
    sound = (
        all(isinstance(n, int) and n > 0 for n in sizes)
        and knot.n_heads % knot.n_kv_heads == 0
        and key_length == value_length == knot.head_dim
        and knot.rope_dim % 2 == 0
        and knot.rope_dim <= knot.head_dim
        and knot.vocab_size <= knot.embedding_rows
        and knot.rms_eps > 0
        and knot.rope_theta > 0
    )
    if not sound:
        raise ModelError("bad-config", f"{name}: the sizes of the model do not fit together: {knot.to_json()}")
    return ModelConfig(
        arch, knot.hidden_size, knot.n_layers, knot.n_heads, knot.n_kv_heads, knot.head_dim, knot.ffn_size,
        knot.vocab_size, knot.embedding_rows, knot.context_length, knot.rms_eps, knot.rope_theta, knot.rope_dim,
        _rope_scale(name, arch, knot.gguf), knot.tied_embedding,
    )  # fmt: skip


def _rope_scale(name: str, arch: str, gguf: Mapping[str, object]) -> float:
    # `linear` divides every position by the factor; older files wrote it as rope.scale_linear
    factor = gguf.get(f"{arch}.rope.scaling.factor", gguf.get(f"{arch}.rope.scale_linear", 1.0))
    if gguf.get(f"{arch}.rope.scaling.type") == "none" or factor == 0.0:
        return 1.0
    if not isinstance(factor, int | float) or factor < 0:
        raise ModelError("bad-config", f"{name}: rope scaling factor {factor!r}: expected a positive number")
    return 1.0 / factor
