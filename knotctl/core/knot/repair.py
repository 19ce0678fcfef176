"""A canonical copy of a knot whose layout or header is wrong and whose bytes are right; the original is not touched.

What is copied is first compared with the digests that the knot has: a repair must not give damage a digest of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from knotctl.core.errors import KnotError, UsageError
from knotctl.core.findings import Finding, Severity
from knotctl.core.gguf.names import PHASES, layer_tensors, order_key
from knotctl.core.knot import layout
from knotctl.core.knot.checks import check_header
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.data import check_data
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.verify import Progress, collect, read_probe
from knotctl.core.knot.whole import verify_whole
from knotctl.core.knot.writer import PayloadTensor, check_destination, write_knot
from knotctl.core.source.base import ByteSource

_LAYER_NAME = re.compile(r"blk_([0-9]{1,5})_(.+)")
_GGUF_PARTS = {t.part: t.gguf.removeprefix("blk.0.") for phase in PHASES for t in layer_tensors(phase, 0)}


@dataclass(frozen=True, slots=True)
class Repair:
    """What was written, and the codes of what it mends. Units: file_bytes in bytes."""

    path: Path
    file_bytes: int
    knot_id: str
    mended: tuple[str, ...]


def repair_knot(
    source: ByteSource,
    dest: Path,
    *,
    force: bool = False,
    progress: Progress = lambda _: nullcontext(lambda _: None),
) -> Repair:
    """Write a canonical copy of the knot in an open source, and return what it mends.

    Raises: UsageError nothing-to-repair; KnotError not-repairable, with the finding that stands in the way;
        SourceError. Whatever is raised, `dest` is as it was.
    """
    check_destination(dest, force=force, src=source.name)
    findings: list[Finding] = []
    data = read_probe(source)
    header = collect(check_header(data, source.size), findings.append)
    if header is not None:
        findings += verify_whole(header)
    for found in findings:
        if found.severity is Severity.ERROR and CODES[found.code].mend != "repair":
            raise _not_repairable(source, found)
    mended = tuple(dict.fromkeys(f.code for f in findings if CODES[f.code].mend == "repair"))
    if header is None or not mended:
        raise UsageError("nothing-to-repair", f"{source.name}: nothing is wrong with it that a copy would mend")

    header = _as_it_lies(data, header, mended)
    with progress(3 * header.payload_bytes) as advance:
        for found in check_data(source, header, advance=advance).findings:
            if found.code == "digest-mismatch" or _undigested(header, found.tensor):
                raise _not_repairable(source, found)
        payload = [_copied(source, header, e) for e in _in_order(header, mended)]
        written = write_knot(dest, header.config, payload, source=header.source, force=force, advance=advance)
    return Repair(dest, written.file_bytes, written.knot_id, mended)


def _as_it_lies(data: bytes, header: KnotHeader, mended: tuple[str, ...]) -> KnotHeader:
    """Return the header by which the payload can be read as it is: of a stale knot it begins a byte early.

    A digest table that is of the wrong length, or speaks of bytes that belong to no tensor, is left out.
    """
    if "stale-layout" in mended:
        _, _, meta_len = layout.PREFIX.unpack_from(data)
        start = layout.stale_payload_offset(meta_len)
        assert start is not None  # or it would not be stale
        header = replace(header, payload_offset=start)
    if "bad-digest-table" in mended or "gap" in mended:
        header = replace(header, tensors=tuple(e for e in header.tensors if e.name != layout.DIGESTS_TENSOR))
    return header


def _undigested(header: KnotHeader, tensor: str | None) -> bool:
    return any(e.name == tensor and e.sha256 is None for e in header.tensors)


def _in_order(header: KnotHeader, mended: tuple[str, ...]) -> Iterable[TensorEntry]:
    """Return the tensors to copy as they lie, or in the order of use where they do not lie in it."""
    tensors = sorted((e for e in header.tensors if e.name != layout.DIGESTS_TENSOR), key=lambda e: e.offset)
    if "out-of-order" not in mended:
        return tensors
    ours = [e for e in tensors if e.name == layout.TOKENIZER_TENSOR]
    return sorted((e for e in tensors if e not in ours), key=lambda e: order_key(_gguf_name(e.name))) + ours


def _gguf_name(knot_name: str) -> str:
    """Return the GGUF name that orders a tensor; of parts that we do not know a guess, which only orders them."""
    m = _LAYER_NAME.fullmatch(knot_name)
    if m is None:
        return knot_name.removesuffix("_weight") + ".weight" if knot_name.endswith("_weight") else knot_name
    return f"blk.{m[1]}.{_GGUF_PARTS.get(m[2], m[2])}"


def _copied(source: ByteSource, header: KnotHeader, e: TensorEntry) -> PayloadTensor:
    start = header.range_of(e).start
    return PayloadTensor(e.name, e.qtype, e.shape, e.length, lambda at, out: source.read_into(start + at, out))


def _not_repairable(source: ByteSource, found: Finding) -> KnotError:
    where = "" if found.tensor is None else f" {found.tensor}:"
    return KnotError(
        "not-repairable",
        f"{source.name}: {found.code}:{where} {found.message}; a copy would not mend this",
        hint="encode the GGUF again, or fetch the knot again",
    )
