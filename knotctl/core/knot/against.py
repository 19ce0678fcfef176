"""Whether a knot is the encoding of a GGUF: config, tokenizer, and every tensor byte for byte."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from knotctl.core.errors import printable
from knotctl.core.findings import Finding
from knotctl.core.gguf.parts import GgufModel
from knotctl.core.knot.codes import finding
from knotctl.core.knot.config import JSON_NAMES, KnotConfig
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.from_gguf import pack_tokenizer, payload_of
from knotctl.core.knot.gguf_config import config_of
from knotctl.core.knot.layout import DIGESTS_TENSOR, TOKENIZER_TENSOR
from knotctl.core.knot.reader import unpack_tokenizer
from knotctl.core.knot.writer import PayloadTensor
from knotctl.core.source.base import ByteSource

Advance = Callable[[int], None]

_PIECE = 1 << 20
_MAX_JOBS = 8


def verify_against(
    source: ByteSource, header: KnotHeader, model: GgufModel, advance: Advance = lambda _: None
) -> Iterator[Finding]:
    """Yield a finding for everything in which a knot, whose header has no error, is not this model.

    Units: advance gets bytes, model.tensor_bytes in all, from any thread, one call at a time.
    Raises: SourceError; GgufError where the model cannot be encoded at all; KnotError `bad-tokenizer`.
    """
    yield from _config(header.config, model)
    entries = {e.name: e for e in header.tensors if e.name != DIGESTS_TENSOR}
    expected = {t.name: t for t in payload_of(model)}
    for name in sorted(expected.keys() - entries.keys()):
        yield finding("source-mismatch", "in the GGUF, not in the knot", tensor=name)
    for name in sorted(entries.keys() - expected.keys()):
        yield finding("source-mismatch", "in the knot, not in the GGUF", tensor=name)
    alike = []
    for name, found in entries.items():
        if name not in expected:
            continue
        wanted = expected[name]
        if name == TOKENIZER_TENSOR:
            yield from _tokenizer(source, header, found, model)
        elif (wanted.qtype, wanted.shape) != (found.qtype, found.shape):
            message = f"expected {wanted.qtype.name} {list(wanted.shape)} as in the GGUF, "
            yield finding("source-mismatch", f"{message}found {found.qtype.name} {list(found.shape)}", tensor=name)
        else:
            alike.append((wanted, found))
    yield from _bytes(source, header, alike, advance)


def _config(found: KnotConfig, model: GgufModel) -> Iterator[Finding]:
    expected = config_of(model)
    if found.vocab_size != expected.vocab_size and 0 < found.vocab_size <= expected.embedding_rows:
        expected = config_of(model, found.vocab_size)  # as `encode --vocab-size` would have written it
    for field in dataclasses.fields(KnotConfig):
        a, b = getattr(expected, field.name), getattr(found, field.name)
        if field.name == "gguf":
            for key in sorted(a.keys() | b.keys()):
                if a.get(key) != b.get(key) or type(a.get(key)) is not type(b.get(key)):
                    yield _differs(f"config.gguf.{key}", a.get(key), b.get(key))
        elif a != b:
            yield _differs(f"config.{JSON_NAMES[field.name]}", a, b)


def _differs(name: str, expected: object, found: object) -> Finding:
    message = f"{printable(name)}: expected {printable(expected, 60)} as in the GGUF, found {printable(found, 60)}"
    return finding("source-mismatch", message)


def _tokenizer(source: ByteSource, header: KnotHeader, entry: TensorEntry, model: GgufModel) -> Iterator[Finding]:
    """Compare what the tokenizers say, not how a version of zstd packed them."""
    span = header.range_of(entry)
    found = unpack_tokenizer(source.read(span.start, len(span)), source.name)
    expected = unpack_tokenizer(pack_tokenizer(model), model.name)
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            message = f"{printable(key)}: differs from the GGUF's"
            yield finding("source-mismatch", message, tensor=entry.name, offset=span.start)


def _bytes(
    source: ByteSource, header: KnotHeader, pairs: list[tuple[PayloadTensor, TensorEntry]], advance: Advance
) -> Iterator[Finding]:
    own, stopped, one_at_a_time = threading.local(), threading.Event(), threading.Lock()

    def first_difference(pair: tuple[PayloadTensor, TensorEntry]) -> tuple[int, int, int] | None:
        """Return where the tensors differ first, and the byte expected and found there."""
        wanted, entry = pair
        if not hasattr(own, "a"):
            own.a, own.b = np.empty(_PIECE, np.uint8), np.empty(_PIECE, np.uint8)
        start = header.range_of(entry).start
        for at in range(0, entry.length, _PIECE):
            if stopped.is_set():
                return None
            n = min(_PIECE, entry.length - at)
            a, b = own.a[:n], own.b[:n]
            wanted.read_into(at, memoryview(a))
            source.read_into(start + at, memoryview(b))
            with one_at_a_time:
                advance(n)
            if not np.array_equal(a, b):
                i = int(np.flatnonzero(a != b)[0])
                return at + i, int(a[i]), int(b[i])
        return None

    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_JOBS), thread_name_prefix="knot-against")
    try:
        for (_, entry), place in zip(pairs, pool.map(first_difference, pairs), strict=True):
            if place is not None:
                at, a, b = place
                message = f"byte {at} of the tensor: expected 0x{a:02x} as in the GGUF, found 0x{b:02x}"
                offset = header.range_of(entry).start + at
                yield finding("source-mismatch", message, tensor=entry.name, offset=offset)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
