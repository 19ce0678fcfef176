"""A GGUF's header, parsed from untrusted bytes in linear time: metadata, and where each tensor's bytes lie.

Nothing is allocated because a file claims it: every count and length is held against what the file still has, and
against `limits`, before it is used. What is returned has been validated whole; nobody behind it checks again.

Source: ggml's gguf specification (docs/gguf.md), versions 2 and 3; cases.md, GGUF.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from struct import Struct
from typing import NoReturn

from knotctl.core.errors import GgufError, printable
from knotctl.core.gguf import limits
from knotctl.core.gguf.limits import SCALAR_CODES, ValueType
from knotctl.core.magic import recognise
from knotctl.core.qtypes import BY_GGML, REMOVED_GGML, QType
from knotctl.core.source.base import ByteSource

_U32 = Struct("<I")
_U64 = Struct("<Q")
_SCALARS = {kind: Struct("<" + code) for kind, code in SCALAR_CODES.items()}
_TYPE_NAMES = {kind.value: kind.name for kind in ValueType}


@dataclass(frozen=True, slots=True)
class GgufValue:
    """One metadata value. Units: offset in bytes from the start of the file."""

    type: ValueType
    value: bool | int | float | str | list[str] | array[int] | array[float]
    offset: int
    item: ValueType | None = None


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


def _shown(name: str) -> str:
    return f'"{printable(name)}"'


def read_gguf(source: ByteSource) -> GgufFile:
    """Return the validated header of a GGUF, version 2 or 3.

    Raises: GgufError with a code a case; SourceError where the bytes cannot be had.
    """
    return _Parser(source).parse()


class _Parser:
    """A position in a window of the file that grows by doubling, so that a header costs few reads and no re-reading."""

    _FIRST_WINDOW = 256 << 10

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.size = source.size
        self.data = b""
        self.pos = 0
        self.strings = 0

    def fail(self, code: str, offset: int, what: str, hint: str | None = None) -> NoReturn:
        raise GgufError(code, f"{printable(self.source.name)}: byte {offset}: {what}", hint=hint)

    # The window

    def need(self, end: int, what: str) -> None:
        """Have the bytes up to `end` in the window, or say at which byte the file ends too early."""
        if end <= len(self.data):
            return
        if end > self.size:
            left = max(self.size - self.pos, 0)
            self.fail(
                "truncated", self.pos, f"{what}: expected {end - self.pos} bytes, found {left} before the file's end"
            )
        if end > limits.HEADER_CAP:
            self.fail("header-too-large", self.pos, f"{what}: expected a header of at most {limits.HEADER_CAP} bytes")
        want = min(max(end, 2 * len(self.data), self._FIRST_WINDOW), self.size, limits.HEADER_CAP)
        self.data += self.source.read(len(self.data), want - len(self.data))

    def u32(self, what: str) -> int:
        self.need(self.pos + 4, what)
        (value,) = _U32.unpack_from(self.data, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(self.pos + 8, what)
        (value,) = _U64.unpack_from(self.data, self.pos)
        self.pos += 8
        return int(value)

    def string(self, what: str, cap: int) -> str:
        start = self.pos
        length = self.u64(f"{what}, length")
        if length > cap:
            self.fail("string-too-long", start, f"{what}: expected at most {cap} bytes, found a length of {length}")
        self.need(self.pos + length, what)
        raw = self.data[self.pos : self.pos + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as e:
            self.fail("bad-utf8", self.pos + e.start, f"{what}: expected UTF-8, found byte 0x{raw[e.start]:02x}")
        self.pos += length
        return text

    # The header

    def parse(self) -> GgufFile:
        version = self.preamble()
        n_tensors = self.count("tensors", limits.TENSORS_CAP, limits.MIN_TENSOR_BYTES)
        n_keys = self.count("keys", limits.KEYS_CAP, limits.MIN_KEY_BYTES)
        metadata: dict[str, GgufValue] = {}
        for i in range(n_keys):
            self.key_value(metadata, f"key {i} of {n_keys}")
        alignment = self.alignment(metadata)
        entries: dict[str, tuple[GgufTensor, int]] = {}
        for i in range(n_tensors):
            self.tensor(entries, f"tensor {i} of {n_tensors}", alignment)
        data_offset = -(-self.pos // alignment) * alignment
        tensors = self.place(entries, data_offset)
        return GgufFile(self.source.name, version, metadata, tensors, alignment, data_offset, self.size)

    def preamble(self) -> int:
        if self.size < 4:
            self.fail("truncated", 0, f"magic: expected 4 bytes, found {self.size} in the whole file")
        self.need(4, "magic")
        if not self.data.startswith(limits.MAGIC):
            kind = recognise(self.data)
            found = repr(self.data[:4]) if kind is None else f"a {kind}"
            self.fail("not-a-gguf", 0, f"magic: expected {limits.MAGIC!r}, found {found}")
        self.pos = 4
        version = self.u32("version")
        if version not in limits.VERSIONS:
            self.bad_version(version)
        return version

    def bad_version(self, raw: int) -> NoReturn:
        swapped = int.from_bytes(raw.to_bytes(4, "little"), "big")
        if raw >= 1 << 16 > swapped:
            hint = "convert it to little-endian: gguf_convert_endian.py of llama.cpp"
            self.fail("big-endian", 4, f"version: expected 2 or 3, found {swapped} in big-endian byte order", hint)
        if raw == 0:
            self.fail("bad-version", 4, "version: expected 2 or 3, found 0, which never was one")
        if raw == 1:
            self.fail("old-version", 4, "version: expected 2 or 3, found 1, of August 2023", "convert the model again")
        self.fail("future-version", 4, f"version: expected 2 or 3, found {raw}", "a newer knotctl may know it")

    def count(self, what: str, cap: int, entry_bytes: int) -> int:
        start = self.pos
        count = self.u64(f"number of {what}")
        if count > cap:
            self.fail("count-too-large", start, f"number of {what}: expected at most {cap}, found {count}")
        if count * entry_bytes > self.size - self.pos:
            left = self.size - self.pos
            self.fail(
                "truncated",
                start,
                f"number of {what}: {count} take at least {count * entry_bytes} bytes, found {left} to the file's end",
            )
        return count

    # Metadata

    def key_value(self, metadata: dict[str, GgufValue], what: str) -> None:
        start = self.pos
        key = self.string(what, limits.KEY_CAP)
        if not key:
            self.fail("empty-key", start, f"{what}: expected a name, found an empty one")
        shown = f"key {printable(key)}"
        if key.startswith("GGUF."):
            self.fail("reserved-key", start, f"{shown}: names that start with GGUF. belong to readers' own fields")
        if key in metadata:
            self.fail("duplicate-key", start, f"{shown}: already given at byte {metadata[key].offset}")
        kind = self.value_type(shown)
        offset = self.pos
        if kind is ValueType.ARRAY:
            item, values = self.array(shown)
            metadata[key] = GgufValue(kind, values, offset, item)
        elif kind is ValueType.STRING:
            metadata[key] = GgufValue(kind, self.string(shown, limits.STRING_CAP), offset)
        else:
            metadata[key] = GgufValue(kind, self.scalar(kind, shown), offset)

    def value_type(self, what: str) -> ValueType:
        start = self.pos
        raw = self.u32(f"{what}, type")
        if raw not in _TYPE_NAMES:
            self.fail("unknown-value-type", start, f"{what}: expected a value type from 0 to 12, found {raw}")
        return ValueType(raw)

    def scalar(self, kind: ValueType, what: str) -> bool | int | float:
        form = _SCALARS[kind]
        self.need(self.pos + form.size, what)
        value: int | float = form.unpack_from(self.data, self.pos)[0]
        if kind is ValueType.BOOL:
            if value not in (0, 1):
                self.fail("bad-bool", self.pos, f"{what}: expected 0 or 1, found {value}")
            value = bool(value)
        self.pos += form.size
        return value

    def array(self, what: str) -> tuple[ValueType, list[str] | array[int] | array[float]]:
        start = self.pos
        item = self.value_type(f"{what}, items")
        if item is ValueType.ARRAY:
            # ggml refuses them too: no model has one, and depth would be the writer's to choose.
            self.fail("nested-array", start, f"{what}: expected an array of scalars or strings, found one of arrays")
        count_at = self.pos
        count = self.u64(f"{what}, number of items")
        width = 8 if item is ValueType.STRING else _SCALARS[item].size
        if count * width > limits.HEADER_CAP:
            self.fail("array-too-long", count_at, f"{what}: {count} items are beyond the {limits.HEADER_CAP} byte cap")
        if count * width > self.size - self.pos:
            left = self.size - self.pos
            self.fail(
                "truncated",
                count_at,
                f"{what}: {count} items take at least {count * width} bytes, found {left} to the file's end",
            )
        if item is ValueType.STRING:
            return item, self.strings_array(what, count)
        self.need(self.pos + count * width, what)
        values = array(SCALAR_CODES[item])
        values.frombytes(memoryview(self.data)[self.pos : self.pos + count * width])
        if sys.byteorder == "big":
            values.byteswap()
        if item is ValueType.BOOL and count and max(values) > 1:
            at = next(i for i, v in enumerate(values) if v > 1)
            self.fail("bad-bool", self.pos + at, f"{what}: item {at}: expected 0 or 1, found {values[at]}")
        self.pos += count * width
        return item, values

    def strings_array(self, what: str, count: int) -> list[str]:
        self.strings += count
        if self.strings > limits.STRINGS_CAP:
            self.fail(
                "array-too-long",
                self.pos,
                f"{what}: expected at most {limits.STRINGS_CAP} strings in all arrays, found {self.strings} or more",
            )
        # Two of these hold 150 thousand strings in most models: everything that can be is a local name.
        out: list[str] = []
        append, unpack = out.append, _U64.unpack_from
        data, pos, have = self.data, self.pos, len(self.data)
        for i in range(count):
            end = pos + 8
            if end <= have:
                end += unpack(data, pos)[0]
            if end > have:
                self.pos = pos
                append(self.string(f"{what}, item {i}", limits.STRING_CAP))
                data, pos, have = self.data, self.pos, len(self.data)
                continue
            try:
                append(data[pos + 8 : end].decode())
            except UnicodeDecodeError:
                self.pos = pos
                self.string(f"{what}, item {i}", limits.STRING_CAP)
            pos = end
        self.pos = pos
        return out

    def alignment(self, metadata: dict[str, GgufValue]) -> int:
        found = metadata.get("general.alignment")
        if found is None:
            return limits.DEFAULT_ALIGNMENT
        n = found.value
        if found.type is not ValueType.U32 or not isinstance(n, int):
            self.fail("bad-alignment", found.offset, f"general.alignment: expected type U32, found {found.type.name}")
        if not 0 < n <= limits.ALIGNMENT_CAP or n & (n - 1):
            cap = limits.ALIGNMENT_CAP
            self.fail("bad-alignment", found.offset, f"general.alignment: expected a power of 2 up to {cap}, found {n}")
        return n

    # Tensors

    def tensor(self, entries: dict[str, tuple[GgufTensor, int]], what: str, alignment: int) -> None:
        start = self.pos
        name = self.string(f"{what}, name", limits.KEY_CAP)
        if not 0 < len(name) <= limits.NAME_CAP or not (name.isascii() and name.isprintable() and " " not in name):
            cap = limits.NAME_CAP
            self.fail(
                "bad-tensor-name",
                start,
                f"{what}: expected 1 to {cap} printable ASCII characters, found {_shown(name)}",
            )
        what = f"tensor {name}"
        if name in entries:
            self.fail("duplicate-tensor", start, f"{what}: already given at byte {entries[name][1]}")
        shape = self.shape(what)
        qtype = self.qtype(what)
        length = qtype.tensor_bytes(shape)
        if length is None:
            self.fail(
                "off-block-row",
                start,
                f"{what}: expected rows in whole blocks of {qtype.block} for {qtype.name}, found rows of {shape[-1]}",
            )
        offset_at = self.pos
        offset = self.u64(f"{what}, offset")
        if offset % alignment:
            self.fail("unaligned-offset", offset_at, f"{what}: expected a multiple of {alignment}, found {offset}")
        entries[name] = GgufTensor(name, qtype, shape, offset, length), start

    def shape(self, what: str) -> tuple[int, ...]:
        start = self.pos
        n_dims = self.u32(f"{what}, number of dimensions")
        if n_dims > limits.DIMS_CAP:
            self.fail("bad-dims", start, f"{what}: expected at most {limits.DIMS_CAP} dimensions, found {n_dims}")
        dims = [self.u64(f"{what}, dimension {i}") for i in range(n_dims)]
        elements = 1
        for n in dims:
            if n > limits.ELEMENTS_CAP:
                self.fail("bad-dims", start + 4, f"{what}: expected dimensions of 0 or more, found {n - (1 << 64)}")
            # Zero is left out so that an empty tensor hides no other absurd dimension.
            elements *= n or 1
        if elements > limits.ELEMENTS_CAP:
            self.fail("dims-overflow", start + 4, f"{what}: {elements} elements do not fit 63 bits")
        # No dimensions is one element to ggml; one dimension says the same and every reader knows it.
        return tuple(reversed(dims)) or (1,)

    def qtype(self, what: str) -> QType:
        start = self.pos
        raw = self.u32(f"{what}, type")
        if raw not in BY_GGML:
            hint = f"supported: {', '.join(t.name for t in BY_GGML.values())}"
            if raw in REMOVED_GGML:
                self.fail("removed-type", start, f"{what}: type {raw} is {REMOVED_GGML[raw]}, which ggml removed", hint)
            self.fail("unknown-type", start, f"{what}: expected a type of ggml, found {raw}", hint)
        return BY_GGML[raw]

    def place(self, entries: dict[str, tuple[GgufTensor, int]], data_offset: int) -> list[GgufTensor]:
        """Return the tensors with absolute offsets, each inside the file and none over another."""
        tensors = []
        for t, at in entries.values():
            begin = data_offset + t.offset
            if begin + t.length > self.size:
                self.fail(
                    "tensor-beyond-file",
                    at,
                    f"tensor {t.name}: expected its bytes {begin} to {begin + t.length} within the file, "
                    f"found a file of {self.size} bytes",
                    "the file may be cut short: fetch it again",
                )
            tensors.append(GgufTensor(t.name, t.qtype, t.shape, begin, t.length))
        before: GgufTensor | None = None
        for t in sorted((t for t in tensors if t.length), key=lambda t: t.offset):
            if before is not None and t.offset < before.offset + before.length:
                self.fail(
                    "overlap",
                    t.offset,
                    f"tensor {t.name}: starts inside {before.name}, which ends at {before.offset + before.length}",
                )
            before = t
        return tensors
