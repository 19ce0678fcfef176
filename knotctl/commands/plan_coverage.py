"""`knotctl plan-coverage`: which node is to hold which layers, why, and what that gives."""

from __future__ import annotations

import math
import re
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import print_json, progress, read_input
from knotctl.commands.options import EndpointUrl
from knotctl.core.errors import FormatError, UsageError, printable
from knotctl.core.sizes import parse_size

if TYPE_CHECKING:
    from knotctl.core.cluster.layers import ModelLayers
    from knotctl.core.cluster.policy import Policy


class Format(StrEnum):
    """How a plan is printed."""

    TABLE = "table"
    JSON = "json"
    SVG = "svg"


class Precision(StrEnum):
    """Which of a node's quantisations a plan uses."""

    SMALLEST = "smallest"
    FINEST = "finest"


def plan_coverage(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="KNOT|PRESET.json", help="The model: a knot or a preset.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="NODES.json|-", help="The nodes, as they register; - is stdin.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="How to print the plan.")] = Format.TABLE,
    kv_headroom: Annotated[
        str,
        typer.Option(metavar="SHARE|SIZE", help="Memory of each node kept for keys and values: 0.2, or 8GiB."),
    ] = "0.2",
    precision: Annotated[
        Precision, typer.Option(help="Of a node's quantisations, the smallest or the finest in which its layers fit.")
    ] = Precision.SMALLEST,
    hop_ms: Annotated[float, typer.Option(min=0, max=60_000, help="Latency from node to node.")] = 5.0,
    link_mbit: Annotated[float, typer.Option(min=0.001, max=1e6, help="Megabits a second to each node.")] = 1000.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Prompt for the time to first token.")] = 512,
    hysteresis: Annotated[
        float, typer.Option(min=0, max=10, help="Share of a token's time that moves must save to be made.")
    ] = 0.1,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO.json|-", help="Replay joins, leaves, slow-downs and lies over hours instead."),
    ] = None,
    endpoint_url: EndpointUrl = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document; the same as --format json.")] = False,
) -> int:
    """Plan which node holds which layers: every layer first, then the fastest route, then copies.

    Gaps go first, to the largest fit. The route is the chain of nodes with the least time a token: the fastest are
    filled, the slowest takes what remains, and a node that costs more in hops than it saves is left out. Spare nodes
    copy the slowest layers. What nodes hold (`current`) is kept unless moving saves more than --hysteresis, and no
    layer loses its last copy on the way. The plan says why each node has its layers, what is lost if it leaves, and
    when fewer nodes, or one, would be faster. Policy and JSON are in knot-cluster(7).

    With --simulate nothing is planned but a cluster run, in simulated time, under the scenario's policies.

    Exit status: 0 every layer is covered; 1 the plan has gaps; 3 a file is not what it should be.

    \b
    Examples:
    $ knotctl plan-coverage --model model.knot --nodes nodes.json
    $ knotctl plan-coverage --model llama-700b.json --nodes nodes.json --format svg > plan.svg
    $ jq .nodes cluster.json | knotctl plan-coverage --model model.knot --nodes - --json | jq .gaps
    $ knotctl plan-coverage --simulate fixtures/cluster/five-leave.json
    """
    from knotctl.core.cluster.nodes import MAX_NODES_BYTES, parse_nodes
    from knotctl.core.cluster.planner import make_plan
    from knotctl.core.cluster.policy import Policy as Rules

    for option, value in (("--hop-ms", hop_ms), ("--link-mbit", link_mbit), ("--hysteresis", hysteresis)):
        if not math.isfinite(value):
            raise UsageError("usage", f"{option}: expected a finite number, found {value}")
    share, reserve = _headroom(kv_headroom)
    policy = Rules(
        kv_headroom=share,
        kv_bytes=reserve,
        precision=precision.value,
        hop_ms=hop_ms,
        link_mbit=link_mbit,
        prompt_tokens=prompt_tokens,
        hysteresis=hysteresis,
    )
    as_json = json or format is Format.JSON
    if simulate is not None:
        if nodes is not None or format is Format.SVG:
            raise UsageError("usage", "--simulate: expected neither --nodes nor --format svg beside it")
        _simulate(simulate, model, policy, as_json)
        return 0
    if model is None or nodes is None:
        missing = "--model" if model is None else "--nodes"
        raise UsageError("usage", f"{missing} is missing: expected --model and --nodes, or --simulate")
    known = read_model(model)
    registered = parse_nodes(read_input(nodes, MAX_NODES_BYTES), known, "stdin" if nodes == "-" else nodes)
    plan = make_plan(known, registered, policy)
    if as_json:
        from knotctl.core.cluster.document import document_of

        print_json(document_of(plan))
    elif format is Format.SVG:
        from knotctl.core.cluster.svg import svg_of

        sys.stdout.write(svg_of(plan))
    else:
        from knotctl.commands.plan_text import plan_lines

        plain = (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf16")
        print("\n".join(plan_lines(plan, plain=plain)))
    return 0 if plan.covered else 1


def _simulate(ref: str, model: str | None, policy: Policy, as_json: bool) -> None:
    from knotctl.commands.simulation_text import simulation_lines
    from knotctl.core.cluster.scenario import MAX_SCENARIO_BYTES, parse_scenario
    from knotctl.core.cluster.simulate import document_of, simulate

    known = None if model is None else read_model(model)
    data = read_input(ref, MAX_SCENARIO_BYTES)
    scenario = parse_scenario(data, policy, known, "stdin" if ref == "-" else printable(ref))
    with progress(scenario.name, int(scenario.hours) * len(scenario.policies), unit="hours") as advance:
        reports = simulate(scenario, advance)
    document = document_of(scenario, reports)
    if as_json:
        print_json(document)
    else:
        print("\n".join(simulation_lines(document)))


def read_model(ref: str) -> ModelLayers:
    """Return the model of a knot or a preset, told apart by their first bytes.

    Raises: FormatError unknown-format and what knots and presets are refused for, SourceError.
    """
    from knotctl.core.cluster.presets import MAX_PRESET_BYTES, parse_preset
    from knotctl.core.knot.header import parse_header
    from knotctl.core.knot.layer_bytes import model_layers
    from knotctl.core.knot.reader import read_header
    from knotctl.core.magic import MAGIC_BYTES, recognise
    from knotctl.core.source.opening import open_source

    source = open_source(ref)
    try:
        head = source.read(0, min(MAGIC_BYTES, source.size))
        kind = recognise(head)
        if kind == "knot":
            header = parse_header(read_header(source), source.size, source.name)
            return model_layers(header, _name(header.config.gguf.get("general.name"), ref))
        if kind is not None or not head.lstrip().startswith(b"{"):
            hint = "encode it first: knotctl encode" if kind == "GGUF" else None
            found = f"a {kind}" if kind else f"{head[:4]!r}"
            raise FormatError("unknown-format", f"{source.name}: expected a knot or a preset, found {found}", hint=hint)
        if source.size > MAX_PRESET_BYTES:
            raise UsageError("too-large", f"{source.name}: expected a preset of at most {MAX_PRESET_BYTES} bytes")
        return parse_preset(source.read(0, source.size), source.name)
    finally:
        source.close()


def _name(stated: object, ref: str) -> str:
    """What the model is called: as its file, which is what nodes are told to load; `general.name` is for people."""
    name = ref.rstrip("/").rsplit("/", 1)[-1].removesuffix(".knot")
    return printable(name or stated, 128)


def _headroom(text: str) -> tuple[float, int | None]:
    """The share of memory, or the bytes, that --kv-headroom names."""
    if m := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%|(0?\.\d{1,9}|0|1)", text.strip()):
        share = float(m[1]) / 100 if m[1] else float(m[2])
        if share > 0.95:
            raise UsageError("bad-headroom", f"--kv-headroom {text}: expected at most 0.95 of a node's memory")
        return share, None
    try:
        return 0.0, parse_size(text)
    except UsageError:
        raise UsageError(
            "bad-headroom",
            f"--kv-headroom {printable(text, 40)!r}: expected a share such as 0.2, or a size such as 8GiB",
        ) from None
