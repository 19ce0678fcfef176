"""Quantisations by name: the bytes that elements take in each, and which names mean the same one.

Source: ggml's block sizes (core/qtypes.py); bitsandbytes for nf4 and fp4 (64 elements share a float32 scale); the
usual 128 elements to a float16 scale and zero for int4. Scales a row (int8, fp8) are below a thousandth, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from knotctl.core.qtypes import QTYPES


@dataclass(frozen=True, slots=True)
class Quantization:
    """One quantisation. Units: block in elements, block_bytes in bytes."""

    name: str
    block: int
    block_bytes: int

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of so many elements, the last block whole."""
        return -(-elements // self.block) * self.block_bytes


_COMMON = (
    Quantization("nf4", 64, 36),
    Quantization("fp4", 64, 36),
    Quantization("int4", 128, 68),
    Quantization("int8", 1, 1),
    Quantization("fp8", 1, 1),
    Quantization("bfloat16", 1, 2),
    Quantization("float16", 1, 2),
    Quantization("float32", 1, 4),
)
# Floats have a common name above; whole numbers are for our own bytes, not for weights.
_GGML = (Quantization(t.name, t.block, t.block_bytes) for t in QTYPES.values() if t.block > 1)
CATALOGUE: dict[str, Quantization] = {q.name: q for q in (*_COMMON, *_GGML)}
_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "int8_float16": "int8", "q4_k_m": "Q4_K", "q4_k_s": "Q4_K", "q5_k_m": "Q5_K", "q5_k_s": "Q5_K",
    "q3_k_m": "Q3_K", "q3_k_s": "Q3_K", "q3_k_l": "Q3_K",
}  # fmt: skip
_BY_LOWER = {name.lower(): name for name in CATALOGUE} | _ALIASES
NATIVE = "native"  # as the model is stored, whatever that is


def canonical(name: str) -> str:
    """Return the one name of a quantisation: `BF16` and `bf16` are bfloat16, `q4_k_m` is Q4_K; others as they are."""
    return _BY_LOWER.get(name.lower(), name)
