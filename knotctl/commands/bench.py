"""`knotctl bench`: tokens per second and memory, alone or against llama-server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from knotctl.commands.console import print_json, print_table, progress, say
from knotctl.commands.options import (
    Json,
    KvTypeOption,
    MemoryBudget,
    Model,
    ResidencyOption,
    Threads,
    budget_bytes,
    kv_type_of,
    residency_of,
)
from knotctl.core.errors import UsageError
from knotctl.core.sizes import format_size


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
    speculate: Annotated[bool, typer.Option("--speculate/--no-speculate", help="Drafts from the text so far.")] = False,
    memory_budget: MemoryBudget = None,
    residency: ResidencyOption = "auto",
    kv_type: KvTypeOption = "f32",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure prompt and generated tokens per second, their spread, and the peak memory.

    With --peer and --peer-model a llama-server binary runs the same tests turn by turn in the same run, and the ratio
    of the medians is printed: machines are noisy, ratios hold.

    \b
    Examples:
    $ knotctl bench demo.knot -p 64 -n 16 -r 2
    $ knotctl bench demo.knot --test tg64@d1024 --floor tg64@d1024=5 --json
    """
    from knotctl.commands.warming import warm_kernels
    from knotctl.core.engine.bench import BenchTest, EngineRunner, PrivateMemory, run_bench
    from knotctl.core.engine.peer import llama_server
    from knotctl.core.engine.pipeline import LocalStages
    from knotctl.core.engine.session import Engine, EngineSpec
    from knotctl.core.errors import CheckFailed
    from knotctl.core.kernels.threads import get_threads

    if (peer is None) != (peer_model is None):
        raise UsageError("usage", "--peer and --peer-model go together")
    names = test or [*([f"pp{prompt}"] if prompt else []), *([f"tg{generate}"] if generate else [])]
    tests = [BenchTest.parse(name) for name in names]
    floors = dict(_floor(text, names) for text in floor or [])
    spec = EngineSpec(
        threads=threads,
        memory_budget=budget_bytes(memory_budget),
        residency=residency_of(residency),
        kv_type=kv_type_of(kv_type),
        context=max((t.context for t in tests), default=0),
        max_batch=max((t.sessions for t in tests), default=1),
        speculate=speculate,
    )
    if not tests:
        raise UsageError("usage", "bench: nothing to measure; give -p, -n or --test")
    warm_kernels()
    with ExitStack() as stack:
        memory = stack.enter_context(PrivateMemory())
        engine = stack.enter_context(Engine.open(knot, spec))
        rival = None
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
        assert isinstance(engine.stages, LocalStages)
        held, mode = engine.stats()["peak_weight_bytes"], engine.stages.stations[0].plan.residency
    if json:
        print_json(
            {
                "model": Path(knot).name.removesuffix(".knot"),
                "threads": get_threads(),
                "residency": mode,
                "results": [r.to_json() for r in results],
                "peak_weight_bytes": held,
                "peak_private_bytes": memory.peak,
            }
        )
    else:
        headings = ["test", "tokens/s", "±", *(["peer", "ratio"] if rival else [])]
        rows = [
            [r.test.name, round(r.mean, 2), round(r.stdev, 2)]
            + ([round(sum(r.peer) / len(r.peer), 2), round(r.ratio or 0, 3)] if rival else [])
            for r in results
        ]
        print_table(headings, rows, title=f"{Path(knot).name}, {get_threads()} threads, {mode}")
        say(f"peak: weights {format_size(held)}, private memory {format_size(memory.peak)}")
    low = [f"{r.test.name} {r.mean:.2f} tokens/s below {floors[r.test.name]:g}" for r in results
           if r.mean < floors.get(r.test.name, 0)]  # fmt: skip
    low += [f"{r.test.name} {r.ratio:.3f} of the peer below {peer_floor:g}" for r in results
            if peer_floor is not None and r.ratio is not None and r.ratio < peer_floor]  # fmt: skip
    if low:
        raise CheckFailed("below-floor", "bench: " + "; ".join(low))


def _floor(text: str, names: list[str]) -> tuple[str, float]:
    name, _, rate = text.partition("=")
    try:
        if name in names:
            return name, float(rate)
    except ValueError:
        pass
    raise UsageError("usage", f"--floor {text!r}: expected TEST=RATE with a test of this run: {', '.join(names)}")
