"""The one validator of a header: it yields findings, and returns the header where there was no error.

`parse_header` runs it strictly (the first error is raised), `verify` collects all it yields; so what is reported and
what is refused cannot differ.

Source: man knot(5), WHAT READERS REFUSE.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from knotctl.core.errors import KnotError, printable
from knotctl.core.findings import Finding
from knotctl.core.knot import layout
from knotctl.core.knot.codes import finding
from knotctl.core.knot.config import JSON_NAMES, KnotConfig
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.seal import KEY, has_seal, seal_holds
from knotctl.core.knot.tensors import check_tensors, is_size
from knotctl.core.magic import recognise
from knotctl.core.strict_json import parse_json_object


def check_header(data: bytes, file_bytes: int) -> Generator[Finding, None, KnotHeader | None]:
    """Yield what is wrong with the header whose bytes `data` begins with; return it, None where it cannot be made out.

    A header that is returned after a finding of severity error is for reports; nothing is to be read by it.

    `data` holds at least the first `header_end` bytes of the file, or all of it where the file is shorter.
    """
    meta_len = yield from check_prefix(data, file_bytes)
    if meta_len is None:
        return None
    meta = data[layout.JSON_OFFSET : layout.JSON_OFFSET + meta_len]
    try:
        document = _parse_metadata(meta)
    except KnotError as e:
        yield finding(e.code, e.message)
        return None
    if not has_seal(document):
        yield finding("missing-digest", f"no `{KEY}` of the metadata: damage to it may not be found")
    elif not seal_holds(meta.rstrip(b" ")):  # a stale knot pads behind the JSON; the JSON is the same
        yield finding("bad-metadata", "JSON: bytes differ from those that were encoded, by their own digest")
    payload = layout.payload_offset(meta_len)
    encoder = yield from _check_field(document, "encoder", str)
    source = yield from _check_field(document, "source", dict)
    if document.get("format") != "knot":
        found = printable(ascii(document.get("format")), 40)
        yield finding("bad-field", f"format: expected 'knot', found {found}")
    items = yield from _check_field(document, "tensors", list)
    entries = None if items is None else (yield from check_tensors(items, payload))
    # Without every entry the payload's length is not known, and the size equation would accuse at random.
    if entries is not None:
        yield from _check_size(data, meta_len, entries, file_bytes)
    fields = yield from _check_field(document, "config", dict)
    config = None if fields is None else (yield from _check_config(fields))
    if entries is None or config is None or encoder is None or source is None:
        return None
    yield from _check_config_fits(config, {e.name: e for e in entries})
    knot_id = hashlib.sha256(data[:payload]).digest()[: layout.KNOT_ID_BYTES].hex()
    return KnotHeader(encoder, source, config, tuple(entries), payload, file_bytes, knot_id)


def check_prefix(data: bytes, file_bytes: int) -> Generator[Finding, None, int | None]:
    """Yield what is wrong with the first ten bytes; return the JSON's length, None where it cannot be relied on."""
    head = data[: len(layout.MAGIC)]
    if head != layout.MAGIC[: len(head)]:
        name = recognise(data)
        found = f"a {name}" if name else ascii(head)
        if name == "GGUF":
            found += ", of which knotctl encode makes one"
        yield finding("not-a-knot", f"magic: expected {layout.MAGIC!a}, found {found}", offset=0)
        return None
    if len(data) < layout.JSON_OFFSET:
        yield finding(
            "truncated", f"header: expected at least {layout.JSON_OFFSET} bytes, found {file_bytes}", offset=file_bytes
        )
        return None
    _, version, meta_len = layout.PREFIX.unpack_from(data)
    if version != layout.VERSION:
        swapped = int.from_bytes(version.to_bytes(2, "little"), "big") == layout.VERSION
        why = "big-endian" if swapped else "of a newer knotctl" if version > layout.VERSION else "never given out"
        yield finding("bad-version", f"version: expected {layout.VERSION}, found {version} ({why})", offset=4)
        return None
    if not 2 <= meta_len <= layout.META_CAP:
        yield finding("bad-meta-length", f"metaLen: expected 2 to {layout.META_CAP} bytes, found {meta_len}", offset=6)
        return None
    if layout.JSON_OFFSET + meta_len > file_bytes:
        yield finding(
            "truncated",
            f"JSON: expected to end at byte {layout.JSON_OFFSET + meta_len}, found the file's end at {file_bytes}",
            offset=file_bytes,
        )
        return None
    return int(meta_len)


def _parse_metadata(meta: bytes) -> dict[str, Any]:
    if not meta.startswith(b"{"):
        raise KnotError("bad-json", f"JSON: expected to begin with {{, found {printable(ascii(meta[:4]), 40)}")
    return parse_json_object(meta, lambda code, what: KnotError(code, f"JSON: {what}"))


def _check_field(document: dict[str, Any], name: str, kind: type) -> Generator[Finding, None, Any]:
    value = document.get(name)
    if type(value) is kind:
        return value
    word = "a string" if kind is str else "an object" if kind is dict else "a list"
    found = "nothing" if value is None else printable(ascii(value), 40)
    yield finding("bad-field", f"{name}: expected {word}, found {found}")
    return None


def _check_size(data: bytes, meta_len: int, entries: Sequence[TensorEntry], file_bytes: int) -> Iterator[Finding]:
    """Yield what the size equation tells: payload offset + payload bytes == file size; then padding and marker.

    A stale knot is told by the equation of its own layout: it holds one byte earlier. Its marker then stands where a
    canonical file has the pad byte NUL, so a canonical file that lost its last byte is never taken for a stale one,
    and a payload byte that is 0x40 by chance at the canonical marker's place decides nothing.
    """
    payload_bytes = max((e.end for e in entries if e.length), default=0)
    payload = layout.payload_offset(meta_len)
    json_end = layout.JSON_OFFSET + meta_len
    stale = layout.stale_payload_offset(meta_len)
    if stale is not None and stale + payload_bytes == file_bytes and data[stale - 1] == layout.MARKER:
        yield finding(
            "stale-layout",
            f"payload begins at byte {stale}; expected {payload}: knot of an encoder before 2026-04-25, "
            "read as it is every block's scale would be a byte of its neighbour",
            offset=stale - 1,
        )
        return
    if file_bytes < payload + payload_bytes:
        cut = min((e for e in entries if payload + e.end > file_bytes), key=lambda e: e.offset, default=None)
        yield finding(
            "truncated",
            f"file: expected {payload + payload_bytes} bytes (payload at {payload}, {payload_bytes} bytes), "
            f"found {file_bytes}",
            offset=file_bytes,
            tensor=cut.name if cut else None,
        )
    elif file_bytes > payload + payload_bytes:
        yield finding(
            "trailing-bytes",
            f"file: expected {payload + payload_bytes} bytes, found {file_bytes}",
            offset=payload + payload_bytes,
        )
    if data[json_end - 1 : json_end].isspace():
        yield finding("bad-padding", "JSON: expected to end with }, found trailing spaces", offset=json_end - 1)
    for i, byte in enumerate(data[json_end : payload - 1]):
        if byte:
            yield finding("bad-padding", f"pad: expected NUL, found 0x{byte:02x}", offset=json_end + i)
    marker = data[payload - 1 : payload]
    if marker and marker[0] != layout.MARKER:
        yield finding("bad-marker", f"marker: expected 0x40, found 0x{marker[0]:02x}", offset=payload - 1)


def _is_real(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type,operator]


def _is_gguf(value: object) -> bool:
    return type(value) is dict and all(type(v) in (str, int, float, bool) for v in value.values())


# Kind of each field of the config, and the test of it.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda v: type(v) is str and bool(v)),
    "int": ("an integer from 0", is_size),
    "float": ("a finite number from 0", _is_real),
    "bool": ("true or false", lambda v: type(v) is bool),
    "Mapping[str, Scalar]": ("an object of scalars", _is_gguf),
}


def _check_config(fields: dict[str, Any]) -> Generator[Finding, None, KnotConfig | None]:
    good = True
    for field, name in JSON_NAMES.items():
        word, holds = _KINDS[str(KnotConfig.__annotations__[field])]
        if name not in fields or not holds(fields[name]):
            found = printable(ascii(fields[name]), 40) if name in fields else "nothing"
            yield finding("bad-config", f"config.{name}: expected {word}, found {found}")
            good = False
    return KnotConfig.from_json(fields) if good else None


def _check_config_fits(config: KnotConfig, entries: dict[str, TensorEntry]) -> Iterator[Finding]:
    embedding = entries.get("token_embd_weight")
    if embedding is None:
        return  # a model without a token table (a projector, a part): verify's missing-tensor speaks where one is due
    expected = [config.embedding_rows, config.hidden_size]
    if list(embedding.shape) != expected:
        message = f"expected shape {expected} by the config, found {list(embedding.shape)}"
        yield finding("config-mismatch", message, tensor=embedding.name)
    if config.vocab_size > config.embedding_rows:
        message = f"vocabSize {config.vocab_size}: expected at most embeddingRows {config.embedding_rows}"
        yield finding("config-mismatch", message)
    elif config.vocab_size < config.embedding_rows:
        padding = config.embedding_rows - config.vocab_size
        message = f"ids {config.vocab_size}..{config.embedding_rows - 1} ({padding}) are padding: no shard owns them"
        yield finding("padded-vocabulary", message, tensor=embedding.name)
    if config.tied_embedding == ("output_weight" in entries):
        message = f"tiedEmbedding: expected {not config.tied_embedding}, found {config.tied_embedding}"
        yield finding("config-mismatch", message)
