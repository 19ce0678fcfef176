"""A position in a header, over a window of the file that grows by doubling: few reads, each byte read once."""

from __future__ import annotations

from struct import Struct
from typing import NoReturn

from knotctl.core.errors import GgufError, printable
from knotctl.core.gguf.limits import HEADER_CAP
from knotctl.core.source.base import ByteSource

_U32 = Struct("<I")
U64 = Struct("<Q")
_FIRST_WINDOW = 256 << 10


class Cursor:
    """Reads little-endian values one after the other; what a message calls a value is given with each.

    Nothing is read because the file claims it: the window never grows beyond the file or the header's cap.
    """

    def __init__(self, source: ByteSource) -> None:
        self.name = printable(source.name, 4096)
        self.size = source.size
        self.data = b""
        self.pos = 0
        self._source = source

    def fail(self, code: str, offset: int, what: str, hint: str | None = None) -> NoReturn:
        """Raise the error of the file at a byte of it."""
        raise GgufError(code, f"{self.name}: byte {offset}: {what}", hint=hint)

    def need(self, length: int, what: str) -> None:
        """Have so many bytes from the position on in the window. Raises: GgufError truncated, header-too-large."""
        end = self.pos + length
        if end <= len(self.data):
            return
        if end > self.size:
            left = self.size - self.pos
            self.fail("truncated", self.pos, f"{what}: expected {length} bytes, found {left} before the file's end")
        if end > HEADER_CAP:
            self.fail("header-too-large", self.pos, f"{what}: expected a header of at most {HEADER_CAP} bytes")
        window = min(max(end, 2 * len(self.data), _FIRST_WINDOW), self.size, HEADER_CAP)
        self.data += self._source.read(len(self.data), window - len(self.data))

    def u32(self, what: str) -> int:
        """Return the next 4 bytes as a number."""
        return int(self.scalar(_U32, what))

    def u64(self, what: str) -> int:
        """Return the next 8 bytes as a number."""
        return int(self.scalar(U64, what))

    def scalar(self, form: Struct, what: str) -> int | float:
        """Return the next value of a form that has one."""
        self.need(form.size, what)
        value: int | float = form.unpack_from(self.data, self.pos)[0]
        self.pos += form.size
        return value

    def count(self, what: str, cap: int, item_bytes: int) -> int:
        """Return a number of items that the file can hold. Raises: GgufError count-too-large, truncated."""
        start = self.pos
        count = self.u64(what)
        if count > cap:
            self.fail("count-too-large", start, f"{what}: expected at most {cap}, found {count}")
        if count * item_bytes > self.size - self.pos:
            found = f"{count} take at least {count * item_bytes} bytes, found {self.size - self.pos} to the file's end"
            self.fail("truncated", start, f"{what}: {found}")
        return count

    def string(self, what: str, cap: int) -> str:
        """Return the next length and that much UTF-8. Raises: GgufError string-too-long, truncated, bad-utf8."""
        start = self.pos
        length = self.u64(f"{what}, length")
        if length > cap:
            self.fail("string-too-long", start, f"{what}: expected at most {cap} bytes, found a length of {length}")
        self.need(length, what)
        raw = self.data[self.pos : self.pos + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as e:
            self.fail("bad-utf8", self.pos + e.start, f"{what}: expected UTF-8, found byte 0x{raw[e.start]:02x}")
        self.pos += length
        return text
