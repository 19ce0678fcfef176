"""A GGUF's header, parsed from untrusted bytes in linear time: metadata, and where each tensor's bytes lie.

Nothing is allocated because a file claims it: every count and length is held against what the file still has, and
against `limits`, before it is used. What is returned has been validated whole; nobody behind it checks again.

Source: ggml's gguf specification (docs/gguf.md), versions 2 and 3; cases.md, GGUF.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import NamedTuple, NoReturn

from knotctl.core.errors import printable
from knotctl.core.gguf import limits
from knotctl.core.gguf.cursor import Cursor
from knotctl.core.gguf.limits import ValueType
from knotctl.core.gguf.metadata import GgufValue, read_metadata
from knotctl.core.magic import recognise
from knotctl.core.qtypes import BY_GGML, REMOVED_GGML, QType
from knotctl.core.source.base import ByteSource

__all__ = ["GgufFile", "GgufTensor", "GgufValue", "read_gguf"]

_NAME = re.compile(rf"[!-~]{{1,{limits.NAME_CAP}}}")
# What follows the number of dimensions: the dimensions, u32 type, u64 offset.
_REST = [Struct(f"<{n}QIQ") for n in range(limits.DIMS_CAP + 1)]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its row-major shape and its bytes in the file. Units: offset (absolute) and length in bytes."""

    name: str
    qtype: QType
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A validated header. Units: alignment, data_offset and size in bytes."""

    name: str
    version: int
    metadata: dict[str, GgufValue]
    tensors: list[GgufTensor]
    alignment: int
    data_offset: int
    size: int


class _Info(NamedTuple):
    """A tensor as the header describes it. Units: at from the file's start, offset from the data's."""

    at: int
    qtype: QType
    shape: tuple[int, ...]
    offset: int
    length: int


def read_gguf(source: ByteSource) -> GgufFile:
    """Return the validated header of a GGUF, version 2 or 3.

    Raises: GgufError with a code a case; SourceError where the bytes cannot be had.
    """
    cursor = Cursor(source)
    version = _read_version(cursor)
    n_tensors = cursor.count("number of tensors", limits.TENSORS_CAP, limits.MIN_TENSOR_BYTES)
    n_keys = cursor.count("number of keys", limits.KEYS_CAP, limits.MIN_KEY_BYTES)
    metadata = read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    infos: dict[str, _Info] = {}
    for i in range(n_tensors):
        _read_info(cursor, infos, f"tensor {i} of {n_tensors}", alignment)
    data_offset = -(-cursor.pos // alignment) * alignment
    tensors = [_placed(cursor, name, info, data_offset) for name, info in infos.items()]
    _check_overlaps(cursor, tensors)
    return GgufFile(source.name, version, metadata, tensors, alignment, data_offset, source.size)


def _read_version(cursor: Cursor) -> int:
    cursor.need(len(limits.MAGIC), "magic")
    if not cursor.data.startswith(limits.MAGIC):
        kind = recognise(cursor.data)
        found = repr(cursor.data[:4]) if kind is None else f"a {kind}"
        if kind == "knot":
            found += ", which is encoded already"
        cursor.fail("not-a-gguf", 0, f"magic: expected {limits.MAGIC!r}, found {found}")
    cursor.pos = len(limits.MAGIC)
    version = cursor.u32("version")
    if version not in limits.VERSIONS:
        _fail_version(cursor, version)
    return version


def _fail_version(cursor: Cursor, raw: int) -> NoReturn:
    swapped = int.from_bytes(raw.to_bytes(4, "little"), "big")
    if raw >= 1 << 16 > swapped:
        hint = "convert it to little-endian: gguf_convert_endian.py of llama.cpp"
        cursor.fail("big-endian", 4, f"version: expected 2 or 3, found {swapped} in big-endian byte order", hint)
    if raw == 0:
        cursor.fail("bad-version", 4, "version: expected 2 or 3, found 0, which never was one")
    if raw == 1:
        cursor.fail("old-version", 4, "version: expected 2 or 3, found 1, of August 2023", "convert the model again")
    cursor.fail("future-version", 4, f"version: expected 2 or 3, found {raw}", "a newer knotctl may know it")


def _alignment(cursor: Cursor, metadata: dict[str, GgufValue]) -> int:
    found = metadata.get("general.alignment")
    if found is None:
        return limits.DEFAULT_ALIGNMENT
    n = found.value
    if found.type is not ValueType.U32 or not isinstance(n, int):
        cursor.fail("bad-alignment", found.offset, f"general.alignment: expected type U32, found {found.type.name}")
    if not 0 < n <= limits.ALIGNMENT_CAP or n & (n - 1):
        expected = f"a power of 2 up to {limits.ALIGNMENT_CAP}"
        cursor.fail("bad-alignment", found.offset, f"general.alignment: expected {expected}, found {n}")
    return n


def _read_info(cursor: Cursor, infos: dict[str, _Info], what: str, alignment: int) -> None:
    start = cursor.pos
    name = cursor.string(what, limits.KEY_CAP)
    if not _NAME.fullmatch(name):
        expected = f"1 to {limits.NAME_CAP} printable ASCII characters"
        cursor.fail("bad-tensor-name", start, f"{what}: expected {expected}, found '{printable(name)}'")
    what = f"tensor {name}"
    if name in infos:
        cursor.fail("duplicate-tensor", start, f"{what}: already described at byte {infos[name].at}")
    dims_at = cursor.pos
    n_dims = cursor.u32(what)
    if n_dims > limits.DIMS_CAP:
        cursor.fail("bad-dims", dims_at, f"{what}: expected at most {limits.DIMS_CAP} dimensions, found {n_dims}")
    rest = _REST[n_dims]
    cursor.need(rest.size, what)
    *dims, kind, offset = rest.unpack_from(cursor.data, cursor.pos)
    cursor.pos += rest.size
    shape = _shape(cursor, dims, dims_at + 4, what)
    if kind not in BY_GGML:
        _fail_type(cursor, kind, cursor.pos - 12, what)
    qtype = BY_GGML[kind]
    length = qtype.tensor_bytes(shape)
    if length is None:
        expected = f"rows in whole blocks of {qtype.block} elements for {qtype.name}"
        cursor.fail("off-block-row", start, f"{what}: expected {expected}, found rows of {shape[-1]}")
    if offset % alignment:
        expected = f"an offset that {alignment} divides"
        cursor.fail("unaligned-offset", cursor.pos - 8, f"{what}: expected {expected}, found {offset}")
    infos[name] = _Info(start, qtype, shape, offset, length)


def _shape(cursor: Cursor, dims: list[int], at: int, what: str) -> tuple[int, ...]:
    elements = 1
    for n in dims:
        if n > limits.ELEMENTS_CAP:
            cursor.fail("bad-dims", at, f"{what}: expected dimensions from 0, found {n - (1 << 64)}")
        # Zero counts as one here, so that an empty tensor cannot hide absurd other dimensions.
        elements *= n or 1
    if elements > limits.ELEMENTS_CAP:
        cursor.fail("dims-overflow", at, f"{what}: expected less than 2^63 elements, found {elements}")
    # No dimensions are one element to ggml; one dimension says the same.
    return tuple(reversed(dims)) or (1,)


def _fail_type(cursor: Cursor, raw: int, at: int, what: str) -> NoReturn:
    hint = f"supported: {', '.join(t.name for t in BY_GGML.values())}"
    if raw in REMOVED_GGML:
        cursor.fail("removed-type", at, f"{what}: type {raw} is {REMOVED_GGML[raw]}, which ggml removed", hint)
    cursor.fail("unknown-type", at, f"{what}: expected a type of ggml, found {raw}", hint)


def _placed(cursor: Cursor, name: str, info: _Info, data_offset: int) -> GgufTensor:
    """Return a tensor with its absolute offset, within the file."""
    begin, end = data_offset + info.offset, data_offset + info.offset + info.length
    if end > cursor.size:
        found = f"expected bytes {begin} to {end} within the file, found {cursor.size} bytes"
        hint = "the file may have been cut short: fetch it again"
        cursor.fail("tensor-beyond-file", info.at, f"tensor {name}: {found}", hint)
    return GgufTensor(name, info.qtype, info.shape, begin, info.length)


def _check_overlaps(cursor: Cursor, tensors: list[GgufTensor]) -> None:
    by_offset = sorted((t for t in tensors if t.length), key=lambda t: t.offset)
    for before, t in pairwise(by_offset):
        end = before.offset + before.length
        if t.offset < end:
            cursor.fail("overlap", t.offset, f"tensor {t.name}: starts inside {before.name}, which ends at {end}")
