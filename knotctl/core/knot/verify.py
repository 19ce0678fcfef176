"""Verification of a knot: collects all that is wrong with it, changes nothing.

Structure is told by the header and the file's size alone; the payload is read on request.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from knotctl.core.errors import KnotError, SourceError
from knotctl.core.findings import Finding, Severity
from knotctl.core.knot.checks import check_header
from knotctl.core.knot.codes import CODES, finding
from knotctl.core.knot.entry import KnotHeader
from knotctl.core.knot.header import header_end
from knotctl.core.knot.layout import PROBE_BYTES, TOKENIZER_TENSOR
from knotctl.core.knot.proof import ProofFile
from knotctl.core.knot.subset import Subset
from knotctl.core.knot.whole import verify_whole
from knotctl.core.source.base import ByteSource

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]

# Findings of one code beyond this many are counted, not listed: a header of a million broken entries stays readable.
LISTED_PER_CODE = 100
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found in one knot. Figures are None where the header is too broken to have them."""

    path: str
    file_bytes: int
    header: KnotHeader | None
    knot_id: str | None  # None where the header has an error
    findings: tuple[Finding, ...]
    unlisted: int  # findings beyond LISTED_PER_CODE of their code
    against: str | None  # the GGUF that the knot was compared with
    data_bytes: int | None  # payload bytes that were read and compared with a digest; None where none were read
    proved_before: bool = False  # a proof spared the reading

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(f.severity is Severity.ERROR for f in self.findings)

    @property
    def payload_bytes(self) -> int | None:
        """Bytes of all tensors together."""
        return None if self.header is None else self.header.payload_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the knot's object in the list that `verify --json` prints."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "ok": self.ok,
            "knot_id": self.knot_id,
            "payload_offset": None if self.header is None else self.header.payload_offset,
            "payload_bytes": self.payload_bytes,
            "file_bytes": self.file_bytes,
            "data_bytes": self.data_bytes,
            "proved_before": self.proved_before,
            "against": self.against,
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "unlisted": self.unlisted,
        }


class _Collector:
    """Findings with their repair command; of each code as many as are listed."""

    def __init__(self, ref: str, gguf: str | None) -> None:
        quoted = shlex.quote(ref)
        self.commands = {
            "repair": f"knotctl repair {quoted} OUT.knot",
            "encode": f"knotctl encode {shlex.quote(gguf) if gguf else 'MODEL.gguf'} {quoted} --force",
        }
        self.counts: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.errors = 0

    def extend(self, found: Iterable[Finding]) -> None:
        for f in found:
            self.add(f)

    def add(self, found: Finding) -> None:
        self.counts[found.code] += 1
        self.errors += found.severity is Severity.ERROR
        if self.counts[found.code] <= LISTED_PER_CODE:
            repair = self.commands.get(CODES[found.code].mend)
            self.findings.append(dataclasses.replace(found, repair=repair))


def verify_knot(
    source: ByteSource,
    ref: str | None = None,
    *,
    read_data: bool = False,
    subset: Subset | None = None,
    against: str | None = None,
    proof: ProofFile | None = None,
    progress: Progress = lambda _: nullcontext(lambda _: None),
) -> Verification:
    """Return all that is wrong with the knot in an open source; `ref` is what its user calls it, for repair commands.

    With `read_data` the payload is read too, the whole or a subset; a `proof` that holds spares the reading, and gets a
    record where all was read and found right. `against` names the GGUF that the knot is to be an encoding of. None of
    it where the header has an error: offsets of a wrong header accuse sound bytes. `progress` is entered with the bytes
    to read and yields what is told of each step.

    Raises: SourceError where bytes cannot be had; what they say is never raised.
    """
    # A file's name can be bytes that are no text; a report is text.
    ref = (source.name if ref is None else ref).encode("utf-8", "backslashreplace").decode()
    collector = _Collector(ref, against)
    header = collect(check_header(read_probe(source), source.size), collector.add)
    sound = header is not None and not collector.errors
    checked = None
    proved = header is not None and sound and proof is not None and proof.holds(source, header)
    if header is not None:
        collector.extend(verify_whole(header))
    if header is not None and sound and read_data and not proved:
        checked = _verify_data(source, header, subset, progress, collector)
        if proof is not None and subset is None and not collector.errors and checked == header.payload_bytes:
            proof.add(source, header)
    if header is not None and sound and against is not None:
        _verify_against(source, header, against, progress, collector)
    return Verification(
        path=ref,
        file_bytes=source.size,
        header=header,
        knot_id=header.knot_id if header is not None and sound else None,
        findings=tuple(collector.findings),
        unlisted=collector.counts.total() - len(collector.findings),
        against=against if sound else None,
        data_bytes=checked,
        proved_before=proved,
    )


def unreadable(ref: str, error: SourceError) -> Verification:
    """Return what is said of a knot whose bytes could not be had, where others are verified too."""
    found = finding("unreadable", f"{error.code}: {error.message}", offset=None)
    return Verification(ref, 0, None, None, (found,), unlisted=0, against=None, data_bytes=None)


def _verify_data(
    source: ByteSource, header: KnotHeader, subset: Subset | None, progress: Progress, collector: _Collector
) -> int:
    # numpy comes with it, which a check of structure does without
    from knotctl.core.knot.data import check_data, data_bytes
    from knotctl.core.knot.text import verify_tokenizer

    with progress(data_bytes(header, subset)) as advance:
        data = check_data(source, header, subset=subset, advance=advance)
    collector.extend(data.findings)
    if not any(f.tensor == TOKENIZER_TENSOR for f in data.findings):
        collector.extend(verify_tokenizer(source, header))
    return data.checked


def _verify_against(
    source: ByteSource, header: KnotHeader, gguf: str, progress: Progress, collector: _Collector
) -> None:
    from knotctl.core.gguf.parts import open_gguf
    from knotctl.core.knot.against import verify_against

    with open_gguf(gguf) as model, progress(model.tensor_bytes) as advance:
        collector.extend(verify_against(source, header, model, advance))


def collect(steps: Generator[Finding, None, KnotHeader | None], add: Callable[[Finding], None]) -> KnotHeader | None:
    """Return the header that a validator makes out; each of its findings is added."""
    while True:
        try:
            add(next(steps))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def read_probe(source: ByteSource) -> bytes:
    """Return what of the header there is, in one read or two, whatever is wrong with it. Raises: SourceError."""
    probe = source.read(0, min(PROBE_BYTES, source.size))
    try:
        end = header_end(probe, source.size)
    except KnotError:
        return probe  # check_header says the same of it, as a finding
    return probe[:end] if end <= len(probe) else probe + source.read(len(probe), end - len(probe))
