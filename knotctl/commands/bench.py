"""`knotctl bench`: tokens per second and memory, in one process or over a cluster, alone or against another way."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import print_json, print_table, progress, say
from knotctl.commands.options import (
    IoOption,
    Json,
    KvTypeOption,
    MemoryBudget,
    Model,
    ResidencyOption,
    Threads,
    budget_bytes,
    io_of,
    kv_type_of,
    residency_of,
)
from knotctl.commands.serve_cluster import (
    DEMO_SHARDS,
    DEMO_STATIONS,
    Processes,
    ShardAt,
    Shards,
    StationAt,
    Stations,
    given_nodes,
    own_processes,
)
from knotctl.commands.serving import TlsCa, TokenFile
from knotctl.core.errors import UsageError
from knotctl.core.sizes import format_size

if TYPE_CHECKING:
    from knotctl.core.engine.bench import Runner
    from knotctl.core.engine.remote import ClusterSpec
    from knotctl.core.engine.session import Engine


def bench(
    knot: Model,
    prompt: Annotated[int, typer.Option("--prompt", "-p", min=0, help="Prompt tokens of the pp test; 0: none.")] = 512,
    generate: Annotated[int, typer.Option("--generate", "-n", min=0, help="Tokens of the tg test; 0: none.")] = 128,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Measured runs of each test.")] = 3,
    test: Annotated[
        list[str] | None, typer.Option("--test", metavar="NAME", help="pp512, tg128, tg128@d4096, tg128x8; repeatable.")
    ] = None,
    floor: Annotated[
        list[str] | None, typer.Option("--floor", metavar="TEST=RATE", help="Exit 1 below this mean rate.")
    ] = None,
    peer: Annotated[Path | None, typer.Option("--peer", metavar="PATH", help="llama-server to compare with.")] = None,
    peer_model: Annotated[Path | None, typer.Option("--peer-model", metavar="GGUF", help="What the peer runs.")] = None,
    peer_option: Annotated[
        list[str] | None, typer.Option("--peer-option", metavar="ARG", help="Given to the peer as it is; repeatable.")
    ] = None,
    peer_floor: Annotated[
        float | None, typer.Option("--peer-floor", min=0, help="Exit 1 below this share of the peer's median rate.")
    ] = None,
    processes: Processes = False,
    shards: Shards = None,
    stations: Stations = None,
    shard_at: ShardAt = None,
    station_at: StationAt = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="one-process|unpipelined", help="The peer of a cluster: this process, or no overlap."
        ),
    ] = None,
    speculate: Annotated[bool, typer.Option("--speculate/--no-speculate", help="Drafts from the text so far.")] = False,
    memory_budget: MemoryBudget = None,
    residency: ResidencyOption = "auto",
    io: IoOption = "auto",
    kv_type: KvTypeOption = "f32",
    threads: Threads = None,
    json: Json = False,
) -> int:
    """Measure prompt and generated tokens per second, their spread, and the peak memory.

    With --peer and --peer-model a llama-server binary runs the same tests turn by turn in the same run, and the ratio
    of the medians is printed: machines are noisy, ratios hold.

    With --processes, or --shard-at and --station-at, a cluster runs the tests as `knotctl serve` would: --against
    one-process measures what the split costs, --against unpipelined what it gains that a prompt's chunks are on several
    stations at once. --threads are those of each station, and of the one process.

    \b
    Examples:
    $ knotctl bench demo.knot -p 64 -n 16 -r 2
    $ knotctl bench demo.knot --test tg64@d1024 --floor tg64@d1024=5 --json
    $ knotctl bench demo.knot --processes --test tg32 --against one-process
    $ knotctl bench demo.knot --processes --shards 1 --threads 1 --test pp1024 --against unpipelined
    """
    from knotctl.commands.warming import warm_kernels
    from knotctl.core.engine.bench import BenchTest, EngineRunner, PrivateMemory, run_bench
    from knotctl.core.engine.peer import llama_server
    from knotctl.core.engine.pipeline import LocalStages
    from knotctl.core.engine.remote import RemoteStages
    from knotctl.core.engine.session import Engine, EngineSpec
    from knotctl.core.kernels.threads import get_threads

    if (peer is None) != (peer_model is None):
        raise UsageError("usage", "--peer and --peer-model go together")
    elsewhere = bool(shard_at or station_at)
    if processes and elsewhere:
        raise UsageError("usage", "bench: --processes starts its own; --shard-at and --station-at are others")
    if (shards or stations) and not processes:
        raise UsageError("usage", "bench: --shards and --stations go with --processes")
    if against not in (None, "one-process", "unpipelined"):
        raise UsageError("usage", f"--against {against}: expected one-process or unpipelined")
    if against is not None and (peer is not None or not (processes or elsewhere)):
        raise UsageError("usage", "--against goes with --processes or --station-at, and without --peer")
    names = test or [*([f"pp{prompt}"] if prompt else []), *([f"tg{generate}"] if generate else [])]
    tests = [BenchTest.parse(name) for name in names]
    floors = dict(_floor(text, names) for text in floor or [])
    spec = EngineSpec(
        threads=threads,
        memory_budget=budget_bytes(memory_budget),
        residency=residency_of(residency),
        kv_type=kv_type_of(kv_type),
        io=io_of(io),
        context=max((t.context for t in tests), default=0),
        max_batch=max((t.sessions for t in tests), default=1),
        speculate=speculate,
    )
    if not tests:
        raise UsageError("usage", "bench: nothing to measure; give -p, -n or --test")
    warm_kernels(knot)
    with ExitStack() as stack:
        memory = stack.enter_context(PrivateMemory())
        cluster = None
        if processes:
            # what is dropped behind a run may still be held when the next one begins
            cluster = stack.enter_context(own_processes(
                knot, shards=shards or DEMO_SHARDS, stations=stations or str(DEMO_STATIONS), context=2 * spec.context,
                memory_budget=spec.memory_budget, residency=residency, kv_type=kv_type, threads=threads, degrade=False,
                log_json=False, io=io,
            ))  # fmt: skip
        elif elsewhere:
            cluster = given_nodes(shard_at or [], station_at or [], token_file, tls_ca, degrade=False)

        def opened(over: ClusterSpec | None) -> Engine:
            stages = None if over is None else (lambda k: RemoteStages(k, over))
            return stack.enter_context(Engine.open(knot, spec, stages))

        engine = opened(cluster)
        rival: Runner | None = None
        if cluster is not None and against is not None:
            rival = EngineRunner(opened(replace(cluster, pipelined=False) if against == "unpipelined" else None))
        if peer is not None and peer_model is not None:
            vocab_size = engine.knot.header.config.vocab_size
            server = llama_server(
                peer,
                peer_model,
                threads=get_threads(),
                tests=tests,
                vocab_size=vocab_size,
                options=peer_option or [],
            )
            rival = stack.enter_context(server)
        advance = stack.enter_context(progress("bench", len(tests) * (repeat + 1), unit="runs"))
        results = run_bench(tests, EngineRunner(engine), repeat=repeat, peer=rival, advance=advance)
        held, mode = engine.stats()["peak_weight_bytes"], residency
        if isinstance(engine.stages, LocalStages):
            mode = engine.stages.stations[0].plan.residency
        used = threads or get_threads()
    low = [f"{r.test.name} {r.mean:.2f} tokens/s below {floors[r.test.name]:g}" for r in results
           if r.mean < floors.get(r.test.name, 0)]  # fmt: skip
    low += [f"{r.test.name} {r.ratio:.3f} of the peer below {peer_floor:g}" for r in results
            if peer_floor is not None and r.ratio is not None and r.ratio < peer_floor]  # fmt: skip
    if json:
        print_json(
            {
                "model": Path(knot).name.removesuffix(".knot"),
                "threads": used,
                "residency": mode,
                "results": [r.to_json() for r in results],
                "peak_weight_bytes": held,
                "peak_private_bytes": memory.peak,
                "below_floor": low,
            }
        )
    else:
        headings = ["test", "tokens/s", "±", *(["peer", "ratio"] if rival else [])]
        rows = [
            [r.test.name, round(r.mean, 2), round(r.stdev, 2)]
            + ([round(sum(r.peer) / len(r.peer), 2), round(r.ratio or 0, 3)] if rival else [])
            for r in results
        ]
        print_table(headings, rows, title=f"{Path(knot).name}, {used} threads, {mode}")
        say(f"peak: weights {format_size(held)}, private memory {format_size(memory.peak)}")
    for what in low:
        say(f"knotctl: bench: {what}")
    return int(bool(low))


def _floor(text: str, names: list[str]) -> tuple[str, float]:
    name, _, rate = text.partition("=")
    try:
        if name in names:
            return name, float(rate)
    except ValueError:
        pass
    raise UsageError("usage", f"--floor {text!r}: expected TEST=RATE with a test of this run: {', '.join(names)}")
