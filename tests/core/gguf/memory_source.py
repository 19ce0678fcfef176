"""A source in memory that counts what is read of it."""

from __future__ import annotations

from knotctl.core.source.base import check_range


class MemorySource:
    def __init__(self, data: bytes, name: str = "memory.gguf") -> None:
        self.name = name
        self.data = data
        self.size = len(data)
        self.identity = name
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.name, self.size, offset, length)
        self.reads.append((offset, length))
        return self.data[offset : offset + length]

    def read_into(self, offset: int, out: memoryview) -> None:
        out[:] = self.read(offset, len(out))

    def close(self) -> None:
        pass
