"""The validator's part for the tensor list: each entry by itself, then how they lie together."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Any

from knotctl.core.errors import printable
from knotctl.core.findings import Finding
from knotctl.core.knot.codes import finding
from knotctl.core.knot.entry import TensorEntry
from knotctl.core.knot.layout import (
    DIGEST_BYTES,
    DIGESTS_TENSOR,
    INT_CAP,
    MAX_DIMS,
    NAME_CAP,
    TOKENIZER_TENSOR,
    UNKNOWN_SHA256,
    digest_count,
)
from knotctl.core.qtypes import QTYPES, QType

_NAME = re.compile(rf"[!-~]{{1,{NAME_CAP}}}")  # printable ASCII, no space
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_size(value: object) -> bool:
    """Say whether a JSON value is an integer within 0..2**63-1; true, 1.0 and "1" are none."""
    return type(value) is int and 0 <= value <= INT_CAP


def check_tensors(items: list[Any], payload: int) -> Generator[Finding, None, list[TensorEntry] | None]:
    """Yield what is wrong with the tensor list; return its entries in file order, None where an entry is broken.

    Units: payload is the offset in the file that tensor offsets count from.
    """
    entries: list[TensorEntry] = []
    seen: set[str] = set()
    undigested = 0
    for i, item in enumerate(items):
        entry = yield from _check_entry(i, item, payload)
        if entry is None:
            continue
        if entry.name in seen:
            yield finding("duplicate-tensor", f"tensors[{i}]: a second tensor of this name", tensor=entry.name)
        seen.add(entry.name)
        undigested += entry.sha256 is None
        entries.append(entry)
    if len(entries) != len(items):
        return None
    yield from _check_tiling(entries, payload)
    yield from _check_digest_table(entries, payload, undigested)
    return entries


def _check_entry(i: int, item: object, payload: int) -> Generator[Finding, None, TensorEntry | None]:
    if type(item) is not dict:
        yield finding("bad-field", f"tensors[{i}]: expected an object, found {_kind(item)}")
        return None
    name = item.get("name")
    if type(name) is not str or not _NAME.fullmatch(name):
        yield finding(
            "bad-name",
            f"tensors[{i}]: name: expected 1 to {NAME_CAP} printable ASCII characters, found {_show(name)}",
            tensor=printable(name) if type(name) is str else None,
        )
        return None
    qtype = yield from _check_type(name, item)
    shape: Any = item.get("shape")
    offset: Any = item.get("offset")
    length: Any = item.get("length")
    sha256: Any = item.get("sha256")
    good = qtype is not None
    if type(shape) is not list or len(shape) > MAX_DIMS or not all(is_size(n) for n in shape):
        yield finding(
            "bad-shape", f"shape: expected up to {MAX_DIMS} integers from 0, found {_show(shape)}", tensor=name
        )
        good = False
    if not is_size(offset):
        yield finding("bad-offset", f"offset: expected an integer from 0 to 2^63-1, found {_show(offset)}", tensor=name)
        good = False
    place = payload + offset if is_size(offset) else None
    if not is_size(length):
        yield finding(
            "bad-length", f"length: expected an integer from 0, found {_show(length)}", tensor=name, offset=place
        )
        good = False
    if sha256 is not None and (type(sha256) is not str or not _SHA256.fullmatch(sha256) or sha256 == UNKNOWN_SHA256):
        yield finding("bad-digest", f"sha256: expected 64 hex digits, found {_show(sha256)}", tensor=name, offset=place)
        good = False
    if not good or qtype is None:
        return None
    expected = qtype.tensor_bytes(tuple(shape))
    if expected is None:
        yield finding(
            "off-block-row",
            f"{qtype.name}: expected rows of a multiple of {qtype.block} elements, found {shape[-1] if shape else 1}",
            tensor=name,
            offset=place,
        )
        return None
    if length != expected:
        yield finding(
            "bad-length",
            f"length: expected {expected} bytes for {qtype.name} {shape}, found {length}",
            tensor=name,
            offset=place,
        )
        return None
    return TensorEntry(name, qtype, tuple(shape), offset, length, sha256)


def _check_type(name: str, item: dict[str, Any]) -> Generator[Finding, None, QType | None]:
    kind, legacy = item.get("type"), item.get("tensor_type")
    if kind is not None and legacy is not None and kind != legacy:
        yield finding("type-conflict", f"type {_show(kind)} but tensor_type {_show(legacy)}", tensor=name)
        return None
    if kind is None and legacy is not None:
        yield finding("legacy-type-field", "expected the type under `type`, found it under `tensor_type`", tensor=name)
        kind = legacy
    if type(kind) is not str or kind not in QTYPES:
        yield finding("unknown-type", f"type: expected a ggml type such as Q4_K, found {_show(kind)}", tensor=name)
        return None
    return QTYPES[kind]


def _check_tiling(entries: list[TensorEntry], payload: int) -> Iterator[Finding]:
    end, last = 0, "the payload's start"
    for e in sorted((e for e in entries if e.length), key=lambda e: (e.offset, e.end)):
        if e.offset != end:
            code, what = ("overlap", "shares bytes with") if e.offset < end else ("gap", "does not follow")
            message = f"{what} {last}: expected offset {end}, found {e.offset}"
            yield finding(code, message, tensor=e.name, offset=payload + e.offset)
        if e.end > end:
            end, last = e.end, e.name
    for e in entries:
        if e.offset > end:  # an empty tensor may lie anywhere within
            yield finding("gap", f"lies behind {last}: expected offset {end} or less, found {e.offset}", tensor=e.name)


def _check_digest_table(entries: list[TensorEntry], payload: int, undigested: int) -> Iterator[Finding]:
    table = next((e for e in entries if e.name == DIGESTS_TENSOR), None)
    if undigested:
        message = f"{undigested} of {len(entries)} tensors have no sha256: damage to them cannot be found"
        yield finding("missing-digest", message)
    elif table is None:
        yield finding("missing-digest", f"no {DIGESTS_TENSOR}: ranges of a tensor cannot be checked by themselves")
    for e in entries:
        if e.name in (TOKENIZER_TENSOR, DIGESTS_TENSOR) and (e.qtype.name != "I8" or len(e.shape) != 1):
            code = "bad-digest-table" if e is table else "bad-tokenizer"
            yield finding(
                code, f"expected I8 of one dimension, found {e.qtype.name} {list(e.shape)}",
                tensor=e.name, offset=payload + e.offset,
            )  # fmt: skip
    if table is not None:
        expected = digest_count(table.offset) * DIGEST_BYTES
        if any(e.end > table.offset for e in entries if e is not table) or table.length != expected:
            yield finding(
                "bad-digest-table",
                f"expected the last tensor, {expected} bytes over {table.offset}; found {table.length} bytes",
                tensor=table.name,
                offset=payload + table.offset,
            )


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number")


def _show(value: object) -> str:
    return "nothing" if value is None else printable(ascii(value), 80)
