"""Fuzz one parser with atheris (libFuzzer): python tests/fuzz/run.py TARGET [-max_total_time=60 …] [CORPUS]

The corpus starts from fixtures/; what libFuzzer finds is written beside where it is run, as crash-….
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["knotctl.core"]):
    from targets import TARGETS

FIXTURES = Path(__file__).parents[2] / "fixtures"
SEEDS = {"knot": "knots/*.knot", "sealed-knot": "knots/*.knot", "gguf": "ggufs/*.gguf", "frame": "frames/*"}


def seeds(target: str, folder: Path) -> None:
    for path in FIXTURES.glob(SEEDS[target]):
        data = path.read_bytes()
        if target == "sealed-knot":
            data = data[10:].rpartition(b'"}')[0] + b'"}'
        (folder / path.name).write_bytes(data[: 64 << 10])


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python tests/fuzz/run.py {'|'.join(TARGETS)} [libFuzzer options] [corpus]")
    target = sys.argv[1]
    with tempfile.TemporaryDirectory() as corpus:
        seeds(target, Path(corpus))
        atheris.Setup([sys.argv[0], *sys.argv[2:], "-rss_limit_mb=1024", "-timeout=5", corpus], TARGETS[target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
