"""The engine of `serve` over shards and stations in processes of its own, or wherever they were started by hand."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import say
from knotctl.commands.options import spans
from knotctl.commands.serving import TOKEN_VARIABLE, cluster_token
from knotctl.core.errors import UsageError

if TYPE_CHECKING:
    from knotctl.core.engine.remote import ClusterSpec
    from knotctl.core.engine.session import Engine

DEMO_SHARDS, DEMO_STATIONS = 8, 2

Shards = Annotated[int | None, typer.Option("--shards", min=1, max=1024, help="Vocabulary shards.")]
Stations = Annotated[
    str | None, typer.Option("--stations", metavar="A:B,…|N", help="Spans of layers, or a number of stations.")
]
Processes = Annotated[
    bool, typer.Option("--processes", help="A process for each shard and station; started again when it dies.")
]
ShardAt = Annotated[
    list[str] | None, typer.Option("--shard-at", metavar="URL[,URL]", help="A shard elsewhere, and its replicas.")
]
StationAt = Annotated[
    list[str] | None, typer.Option("--station-at", metavar="URL[,URL]", help="A station elsewhere, and replicas.")
]


@contextmanager
def own_processes(
    knot: str, *, shards: int, stations: str, context: int, memory_budget: int | None, residency: str,
    threads: int | None, degrade: bool, log_json: bool, wardens: bool = False, kv_type: str = "f32", io: str = "auto",
    head_on_shards: bool = False,
) -> Iterator[ClusterSpec]:  # fmt: skip
    """Start a process for each shard and station, and yield where they are; they end with the block.

    With wardens, a row warden stands between the shards and the knot, and a layer warden between the stations and it.
    """
    from knotctl.commands.warming import warm_kernels
    from knotctl.core.engine.pipeline import layer_spans
    from knotctl.core.engine.remote import ClusterSpec
    from knotctl.core.knot.reader import open_knot
    from knotctl.services.supervisor import Supervisor

    with open_knot(knot) as k:
        n_layers = k.header.config.n_layers
    parts = layer_spans(int(stations) if stations.isdecimal() else spans(stations), n_layers)
    # a token nobody else knows: other users of this machine can reach loopback too
    token = secrets.token_hex(24)
    environment = {TOKEN_VARIABLE: token}
    logs = ["--log-json"] if log_json else []
    with ExitStack() as stack:
        behind: list[list[str]] = [[], []]
        if wardens:
            kinds = {"row warden": "--rows", "layer warden": "--layers"}
            caches = {name: ["warden", knot, kind, ":", *logs] for name, kind in kinds.items()}
            say("knotctl: starting a row warden and a layer warden …")
            own = stack.enter_context(Supervisor(caches, environment))
            behind = [["--warden", c.url] for c in own.children]
            # what the warden holds is multiplied with where it lies: a copy of one's own would only take room
            residency = "fluid" if residency == "auto" else residency
        commands = {
            f"shard {i}": ["shard-embed", knot, "--shard", f"{i}/{shards}", "--serve", *behind[0], *logs]
            for i in range(shards)
        }
        for i, span in enumerate(parts):
            argv = ["run-station", knot, "--layers", str(span), "--serve", "--residency", residency, "-c", str(context)]
            argv += ["--kv-type", kv_type, "--io", io, *behind[1]]
            argv += ["--head-on-shards"] if head_on_shards and span.end == n_layers else []
            if memory_budget is not None:
                # each station's part of the budget follows from its layers, as in one process
                argv += ["--memory-budget", str(memory_budget * len(span) // n_layers)]
            if threads is not None:
                argv += ["--threads", str(threads)]
            commands[f"station {i}"] = argv + logs
        # here, where its progress is seen, and once, not by every station for itself
        warm_kernels()
        say(f"knotctl: starting {shards} shard and {len(parts)} station processes …")
        supervisor = stack.enter_context(Supervisor(commands, environment))
        urls = [[c.url] for c in supervisor.children]
        yield ClusterSpec(urls[:shards], urls[shards:], token=token, degrade=degrade, head_on_shards=head_on_shards)


def given_nodes(
    shards: Sequence[str], stations: Sequence[str], token_file: Path | None, tls_ca: Path | None, *, degrade: bool
) -> ClusterSpec:
    """Return where nodes are that were started by hand; replicas of one stand together, with commas."""
    from knotctl.core.engine.remote import ClusterSpec
    from knotctl.services.server import trust

    if not shards or not stations:
        raise UsageError("usage", "--shard-at, --station-at: give both, each as often as there are shards and stations")
    lists = [[[u for u in text.split(",") if u] for text in group] for group in (shards, stations)]
    token = cluster_token(token_file).own
    return ClusterSpec(lists[0], lists[1], token=token, tls=trust(tls_ca), degrade=degrade)


def cluster_engine(knot: str, spec: ClusterSpec, context: int) -> Engine:
    """Return the engine over a cluster's nodes, once all of them are ready."""
    from knotctl.core.engine.remote import RemoteStages
    from knotctl.core.engine.session import Engine, EngineSpec

    return Engine.open(knot, EngineSpec(context=context), lambda k: RemoteStages(k, spec))
