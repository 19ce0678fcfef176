"""What a file is, by its first bytes: for dispatch, and so that a refusal can name the format that was found."""

from __future__ import annotations

MAGIC_BYTES = 16  # as many as recognise() looks at

_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"KNOT", "knot"),
    (b"GGUF", "GGUF"),
    (b"FUGG", "big-endian GGUF"),
    (b"AWFR", "frame"),
    (b"lmgg", "GGML (before GGUF)"),
    (b"fmgg", "GGMF (before GGUF)"),
    (b"tjgg", "GGJT (before GGUF)"),
    (b"algg", "GGLA (a LoRA before GGUF)"),
    (b"PK\x03\x04", "zip (a PyTorch checkpoint?)"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x80\x02", "pickle"),
    (b"\x80\x03", "pickle"),
    (b"\x80\x04", "pickle"),
    (b"\x80\x05", "pickle"),
    (b"\x89HDF", "HDF5"),
    (b"version https://", "Git LFS pointer (the file itself was not fetched)"),
    (b"<!DOCTYPE", "HTML page (an error page saved as a model?)"),
    (b"<html", "HTML page (an error page saved as a model?)"),
)


def recognise(head: bytes) -> str | None:
    """Return the name of the format that these first bytes begin, or None."""
    for magic, name in _MAGICS:
        if head.startswith(magic):
            return name
    # safetensors: u64 length of a JSON header, then the header
    return "safetensors" if head[8:10] == b'{"' and head[5:8] == b"\0\0\0" else None
