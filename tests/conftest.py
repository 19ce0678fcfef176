"""Real models for tests marked `model`: fetched files and their knots, encoded once a session's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Nothing is timed in a test: a machine that is busy with something else is no failure.
settings.register_profile("knotctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("knotctl")

MODELS = Path(os.environ.get("KNOTCTL_MODELS", "~/.cache/knotctl-models")).expanduser()
FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}
FIXTURES = Path(__file__).parent.parent / "fixtures"
# Right answers on real models; laid beside the checkout on the developers' and CI's machines.
REFERENCE = Path(os.environ.get("KNOTCTL_REFERENCE", Path(__file__).parent.parent.parent / "shared" / "reference"))


def require(path: Path) -> Path:
    """The path, or a skip; a failure where CI promised that models are there (KNOTCTL_REQUIRE_MODELS=1)."""
    if not path.exists():
        if os.environ.get("KNOTCTL_REQUIRE_MODELS"):
            pytest.fail(f"{path} is absent")
        pytest.skip(f"{path} is absent (.ci/run fetches it)")
    return path


@pytest.fixture(scope="session")
def gguf_of() -> Callable[[str], Path]:
    """`gguf_of("coder-1.5b")` is the real GGUF file, or a skip."""
    return lambda name: require(MODELS / FILES[name])


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Path]:
    """`reference("coder-1.5b.json")` is a file of right answers, or a skip."""
    return lambda name: require(REFERENCE / name)


@pytest.fixture(scope="session")
def knot_of(gguf_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`knot_of("coder-1.5b")` is the model's knot, encoded once a session by the code under test."""
    done: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in done:
            from knotctl.cli import main

            knot = tmp_path_factory.mktemp("knots") / f"{name}.knot"
            assert main(["encode", str(gguf_of(name)), str(knot)]) == 0
            done[name] = knot
        return done[name]

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny("tiny-llama")` is the knot of that fixture, encoded by the code under test."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(name: str) -> Path:
        path = folder / f"{name}.knot"
        if not path.exists():
            from knotctl.cli import main

            assert main(["encode", str(FIXTURES / f"{name}.gguf"), str(path)]) == 0
        return path

    return make
