"""A model in one GGUF or in several parts (`-00001-of-000NN.gguf`), seen as one.

Source: llama.cpp's gguf-split, which writes `split.no`, `split.count` and `split.tensors.count` into every part.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

from knotctl.core.errors import GgufError, printable
from knotctl.core.gguf.header import GgufFile, GgufTensor, read_gguf
from knotctl.core.gguf.metadata import GgufValue
from knotctl.core.source.base import ByteSource
from knotctl.core.source.opening import open_source

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)
# Each part is an open file; the largest published models come in under 100.
_PARTS_CAP = 512
_SPLIT_KEYS = "split."


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata of the first part, and the tensors of all, each with the source that holds its bytes."""

    name: str
    version: int
    metadata: dict[str, GgufValue]
    tensors: list[tuple[GgufTensor, ByteSource]]
    sources: tuple[ByteSource, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.length for t, _ in self.tensors)

    def close(self) -> None:
        """Close every part."""
        for source in self.sources:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_gguf(ref: str) -> GgufModel:
    """Return the open model that a GGUF, or any one part of a split GGUF, belongs to.

    Raises: GgufError, SourceError.
    """
    with ExitStack() as opened:
        source = open_source(ref)
        opened.callback(source.close)
        file = read_gguf(source)
        count = _number(file, "split.count", default=1)
        sources, files = [source], [file]
        if count > 1:
            refs = part_names(ref, count, file)
            sources, files = [], []
            for i, part in enumerate(refs):
                at = source if part == ref else open_source(part)
                opened.callback(at.close)
                sources.append(at)
                files.append(file if part == ref else read_gguf(at))
                _check_part(files[-1], i, count)
        model = _joined(files, sources)
        opened.pop_all()
        return model


def part_names(ref: str, count: int, file: GgufFile) -> list[str]:
    """Return the names of all parts by the name of one. Raises: GgufError bad-split."""
    m = PART_NAME.fullmatch(ref)
    if m is None or int(m["count"]) != count or not 1 <= int(m["no"]) <= count:
        _fail(file, f"expected a name that ends in -NNNNN-of-{count:05}.gguf, as split.count says")
    if count > _PARTS_CAP:
        _fail(file, f"split.count: expected at most {_PARTS_CAP} parts, found {count}")
    return [f"{m['stem']}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]


def _check_part(file: GgufFile, index: int, count: int) -> None:
    found = _number(file, "split.no", default=-1), _number(file, "split.count", default=-1)
    if found != (index, count):
        _fail(file, f"expected split.no {index} of split.count {count}, found {found[0]} of {found[1]}")


def _joined(files: list[GgufFile], sources: list[ByteSource]) -> GgufModel:
    first = files[0]
    seen: dict[str, str] = {}
    tensors = []
    for file, source in zip(files, sources, strict=True):
        for t in file.tensors:
            if t.name in seen:
                _fail(file, f"tensor {t.name}: already in {seen[t.name]}", "duplicate-tensor")
            seen[t.name] = printable(file.name)
            tensors.append((t, source))
    expected = _number(first, "split.tensors.count", default=len(tensors))
    if expected != len(tensors):
        _fail(first, f"split.tensors.count: expected {expected} tensors in all parts, found {len(tensors)}")
    # How a model was cut says nothing about the model: its knot is the same as that of the whole file.
    metadata = {key: value for key, value in first.metadata.items() if not key.startswith(_SPLIT_KEYS)}
    return GgufModel(first.name, first.version, metadata, tensors, tuple(sources))


def _number(file: GgufFile, key: str, default: int) -> int:
    found = file.metadata.get(key)
    if found is None:
        return default
    if not isinstance(found.value, int) or isinstance(found.value, bool):
        _fail(file, f"{key}: expected an integer, found {found.type.name}", "wrong-type")
    return found.value


def _fail(file: GgufFile, what: str, code: str = "bad-split") -> NoReturn:
    raise GgufError(code, f"{printable(file.name)}: {what}")
