"""What the GGUF parser refuses before it allocates: the only numbers, each with its reason.

Source: ggml's gguf specification; cases.md, GGUF.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32

# Real headers are 2 to 25 MiB (a vocabulary of 256k with merges); an embedded tokenizer.json can add 33 MiB.
HEADER_CAP: Final = 128 << 20
# The specification's own limit for keys.
KEY_CAP: Final = 65_535
# Long values are licences, chat templates and embedded tokenizer files; the header has to hold them anyway.
STRING_CAP: Final = HEADER_CAP
# Strings of all arrays together: the largest vocabularies come to 700 thousand with their merges.
STRINGS_CAP: Final = 1 << 21
# The largest unmerged mixture of experts has 23 thousand tensors.
TENSORS_CAP: Final = 1 << 16
KEYS_CAP: Final = 1 << 16
ALIGNMENT_CAP: Final = 1 << 20
# ggml's GGML_MAX_DIMS, and GGML_MAX_NAME less its NUL.
DIMS_CAP: Final = 4
NAME_CAP: Final = 63
# ggml counts elements in int64.
ELEMENTS_CAP: Final = (1 << 63) - 1

# Smallest entries: key length, one byte of key, type, one byte of value; name length, one byte, n_dims, type, offset.
MIN_KEY_BYTES: Final = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 4 + 8


class ValueType(IntEnum):
    """The type of a metadata value, by its number in the file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


# struct and array codes; every one of them has the same size in both on all platforms that Python runs on.
SCALAR_CODES: Final = {
    ValueType.U8: "B", ValueType.I8: "b", ValueType.U16: "H", ValueType.I16: "h", ValueType.U32: "I",
    ValueType.I32: "i", ValueType.F32: "f", ValueType.BOOL: "B", ValueType.U64: "Q", ValueType.I64: "q",
    ValueType.F64: "d",
}  # fmt: skip
