"""How fast a whole answer is, on real models: the engine in this process, and the command from a shell.

`pytest tests/benchmarks/bench_end_to_end.py --benchmark-only`. `knotctl bench` measures any model of one's own, beside
llama.cpp where asked to.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.model.budget import Residency
from knotctl.core.tokens.sampler import SamplingParams

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0)


def generate(engine: Engine, prompt: int, count: int, sessions: int = 1) -> None:
    streams = [
        engine.submit([100 + i, *range(1000, 999 + prompt)], GREEDY, count, ignore_stop=True) for i in range(sessions)
    ]
    for stream in streams:
        assert len(list(stream)) == count


@pytest.mark.parametrize("name", ["smollm2", "coder-0.5b", "coder-1.5b"])
@pytest.mark.parametrize(("prompt", "count", "sessions"), [(512, 1, 1), (1, 32, 1), (1, 32, 8)], ids=str)
def test_generate(
    benchmark: Any, knot_of: Callable[[str], Path], name: str, prompt: int, count: int, sessions: int
) -> None:
    with Engine.open(str(knot_of(name)), EngineSpec(residency=Residency.RESIDENT, speculate=False)) as engine:
        generate(engine, 8, 2)
        benchmark.pedantic(generate, (engine, prompt, count, sessions), rounds=5)
        if benchmark.stats is not None:
            made = (prompt if count == 1 else count) * sessions
            benchmark.extra_info["tokens_per_s"] = round(made / benchmark.stats.stats.median, 1)


@pytest.mark.parametrize("budget", [96, 128])
def test_generate_under_a_budget(benchmark: Any, knot_of: Callable[[str], Path], budget: int) -> None:
    with Engine.open(str(knot_of("coder-0.5b")), EngineSpec(memory_budget=budget << 20, speculate=False)) as engine:
        generate(engine, 8, 2)
        benchmark.pedantic(generate, (engine, 64, 8), rounds=3)


def test_command_of_one_token(benchmark: Any, knot_of: Callable[[str], Path]) -> None:
    """A new process, from its start to its end."""
    command = [sys.executable, "-m", "knotctl", "generate", str(knot_of("smollm2")), "Once upon", "-n", "1"]
    benchmark.pedantic(subprocess.run, (command,), {"check": True, "capture_output": True}, rounds=5, warmup_rounds=1)
