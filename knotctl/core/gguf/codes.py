"""What each code of a GgufError means, in a line: also the name of its fixture (fixtures/ggufs) and test."""

from __future__ import annotations

from typing import Final

# Of the file, whatever model is in it.
FORMAT_CODES: Final[dict[str, str]] = {
    "truncated": "The file ends before its header does, or cannot hold as much as a count or length claims.",
    "not-a-gguf": "The file does not begin with the magic bytes GGUF.",
    "bad-version": "The version is 0, which was never given out.",
    "old-version": "The version is 1, which had other widths.",
    "future-version": "The version is one that this knotctl does not know.",
    "big-endian": "The file is of big-endian byte order.",
    "header-too-large": "The header is over the cap.",
    "count-too-large": "A number of tensors, keys or items is over the cap.",
    "string-too-long": "A key, name or text is over the cap.",
    "bad-utf8": "A key, name or text is not UTF-8.",
    "empty-key": "A key has no name.",
    "reserved-key": "A key's name begins with GGUF., as readers call their own fields.",
    "duplicate-key": "A key is given twice.",
    "unknown-value-type": "A value's type is none of the thirteen.",
    "nested-array": "An array holds arrays.",
    "bad-bool": "A truth value is neither 0 nor 1.",
    "bad-alignment": "general.alignment is not a U32 that is a power of 2, or is over the cap.",
    "bad-tensor-name": "A tensor's name is empty, too long, or not printable ASCII.",
    "duplicate-tensor": "Two tensors have one name, in the file or in the knot made of it.",
    "bad-dims": "A tensor has more than four dimensions, or a negative one.",
    "dims-overflow": "A tensor has more elements than 63 bits count.",
    "unknown-type": "A tensor's type is none that ggml has.",
    "removed-type": "A tensor's type is one that ggml took back.",
    "off-block-row": "A tensor's rows are not whole blocks of its type.",
    "unaligned-offset": "A tensor does not begin at a multiple of the alignment.",
    "tensor-beyond-file": "A tensor's bytes are not all within the file.",
    "overlap": "Two tensors share bytes.",
    "bad-split": "The parts of a split GGUF do not belong together, or one is missing from the count.",
}

# Of the model in it, when it is encoded.
MODEL_CODES: Final[dict[str, str]] = {
    "missing-key": "A key without which the model cannot be described is not there.",
    "wrong-type": "A key's value is of another type than the key's meaning needs.",
    "bad-value": "A key's value makes no sense.",
    "wrong-shape": "The token table's shape is not that of one, or not as wide as the model.",
    "missing-tensor": "A tensor that the architecture needs is not there.",
    "extra-layer": "There is a layer beyond block_count.",
    "non-finite-value": "A number in the metadata is infinite or not a number.",
    "tokenizer-too-large": "The tokenizer is over the cap.",
}
