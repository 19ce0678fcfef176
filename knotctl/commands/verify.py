"""`knotctl verify`: findings about knots, for people and for CI."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from knotctl.commands.console import print_json, progress
from knotctl.commands.options import EndpointUrl
from knotctl.core.errors import SourceError, UsageError, printable

if TYPE_CHECKING:
    from knotctl.core.knot.proof import ProofFile
    from knotctl.core.knot.subset import Subset
    from knotctl.core.knot.verify import Verification


class Format(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"
    JUNIT = "junit"


def verify(
    knots: Annotated[
        list[str],
        typer.Argument(metavar="KNOT...", help="Knots: paths, patterns such as 'models/*.knot', s3:// or http(s)://."),
    ],
    format: Annotated[Format, typer.Option("--format", help="How to print findings.")] = Format.TEXT,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read the payload too: digests, scales, the tokenizer.")
    ] = False,
    subset: Annotated[
        str | None,
        typer.Option(metavar="PART", help="Read only a part: slice 2/10, or 10% or 1GiB drawn at random."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="GGUF", help="Prove that the one knot is this model, byte for byte.")
    ] = None,
    proof: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep in FILE what was verified; do not read again what has not changed."),
    ] = None,
    endpoint_url: EndpointUrl = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document; the same as --format json.")] = False,
) -> int:
    """Check knots and report every defect, with its place and the command that mends it.

    The header and the file's size tell whether the structure is right. With --read-data every byte is compared with its
    digest and every block's scale looked at; --subset does it for a part, so that ten nightly runs cover the whole.
    Under --format github annotations follow the text, and the step's summary is written where GitHub wants it.

    Exit status: 0 no errors (warnings and notes do not fail); 1 findings of severity error; 4 a knot cannot be read.

    \b
    Examples:
    $ knotctl verify model.knot
    $ knotctl verify --read-data --subset 3/10 model.knot
    $ knotctl verify --read-data --proof verified.json models/*.knot
    $ knotctl verify --against model.gguf model.knot
    $ knotctl verify --format sarif models/*.knot > knots.sarif
    $ knotctl verify --json 'models/*.knot' | jq '.[] | select(.ok | not) | .path'
    """
    from knotctl.commands.report_text import text_lines
    from knotctl.core.knot.proof import ProofFile
    from knotctl.core.knot.subset import Subset
    from knotctl.core.knot.verify import unreadable
    from knotctl.core.source.opening import expand_refs

    for option, value in (("--subset", subset), ("--proof", proof)):
        if value is not None and not read_data:
            raise UsageError("usage", f"{option}: expected --read-data beside it")
    proofs = None if proof is None else ProofFile(proof)
    part = None if subset is None else Subset.parse(subset)
    refs = expand_refs(knots)
    if against is not None and len(refs) != 1:
        raise UsageError("usage", f"--against: expected one knot beside it, found {len(refs)}")
    if json:
        format = Format.JSON
    options = _Options(read_data, part, against, proofs)
    results, worst = [], 0
    for ref in refs:
        try:
            results.append(_verify_one(ref, options))
        except SourceError as e:
            # Of one knot it is the error; of several the others are still to be verified.
            if len(refs) == 1:
                raise
            results.append(unreadable(ref, e))
            worst = e.exit_code
        if format in (Format.TEXT, Format.GITHUB):
            print(*text_lines(results[-1]), sep="\n", flush=True)
    _print_whole(format, results)
    return worst or (0 if all(r.ok for r in results) else 1)


class _Options(NamedTuple):
    read_data: bool
    subset: Subset | None
    against: str | None
    proof: ProofFile | None


def _verify_one(ref: str, options: _Options) -> Verification:
    from knotctl.core.knot.verify import verify_knot
    from knotctl.core.source.opening import open_source

    source = open_source(ref)
    try:
        bar = partial(progress, f"verify {printable(ref, 40)}")
        return verify_knot(source, ref, progress=bar, **options._asdict())
    finally:
        source.close()


def _print_whole(format: Format, results: list[Verification]) -> None:
    """Print what is one document of all knots; text was printed knot by knot."""
    if format is Format.JSON:
        print_json([r.to_json() for r in results])
    elif format is Format.GITHUB:
        from knotctl.commands.report_github import workflow_commands, write_summary

        print(*workflow_commands(results), sep="\n")
        write_summary(results)
    elif format is Format.SARIF:
        from knotctl.commands.report_sarif import sarif

        print_json(sarif(results))
    elif format is Format.JUNIT:
        from knotctl.commands.report_junit import junit

        print(junit(results), end="")
