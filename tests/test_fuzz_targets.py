"""The fuzz targets hold on every fixture and on changes of it; .ci/run lets libFuzzer look for more."""

from __future__ import annotations

import importlib.util
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.core.errors import FormatError
from knotctl.core.knot import layout
from knotctl.core.knot.header import parse_header

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
CHANGES = 40


def targets() -> dict[str, Callable[[bytes], None]]:
    spec = importlib.util.spec_from_file_location("fuzz_targets", ROOT / "tests" / "fuzz" / "targets.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TARGETS  # type: ignore[no-any-return]


TARGETS = targets()


def change(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 2:
            return data[:at] + data[at + rng.randrange(1, 20) :]
        case 3:
            return data[:at] + rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7)) + data[at + 8 :]
        case _:
            other = rng.randrange(len(data) + 1)
            return data[:at] + data[other : other + 30] + data[at:]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("knots/*.knot")), ids=lambda p: p.stem)
@pytest.mark.parametrize("target", ["knot", "sealed-knot"])
def test_knots(target: str, path: Path) -> None:
    data, rng = path.read_bytes(), random.Random(path.name)
    if target == "sealed-knot":
        data = data[layout.JSON_OFFSET :].rpartition(b'"}')[0] + b'"}'
    TARGETS[target](data)
    for _ in range(CHANGES):
        TARGETS[target](change(data, rng))


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("**/*.gguf")), ids=lambda p: p.stem)
def test_ggufs(path: Path) -> None:
    data, rng = path.read_bytes()[: 32 << 10], random.Random(path.name)
    for _ in range(CHANGES):
        TARGETS["gguf"](change(data, rng))


def test_a_header_that_passes_its_digest_is_reached() -> None:
    """The target that seals what it is given must get past the seal, or it fuzzes nothing."""
    meta = (FIXTURES / "knots" / "small.knot").read_bytes()[layout.JSON_OFFSET :].rpartition(b'"}')[0] + b'"}'
    changed = meta.replace(b'"ropeTheta":10000.0', b'"ropeTheta":10001.0')
    reached: list[bytes] = []
    names = TARGETS["sealed-knot"].__globals__
    real, names["knot"] = names["knot"], reached.append
    try:
        TARGETS["sealed-knot"](changed)
    finally:
        names["knot"] = real
    with pytest.raises(FormatError) as e:
        parse_header(reached[0], len(reached[0]))
    assert e.value.code == "truncated"  # there is no payload, but the metadata is what its digest says


@pytest.mark.parametrize(
    "data",
    [
        layout.PREFIX.pack(layout.MAGIC, layout.VERSION, 2**32 - 1) + bytes(90),
        layout.PREFIX.pack(layout.MAGIC, layout.VERSION, layout.META_CAP) + bytes(90),
        layout.PREFIX.pack(layout.MAGIC, layout.VERSION, 90) + b"[" * 90,
        layout.PREFIX.pack(layout.MAGIC, layout.VERSION, 90) + b'{"a":' + b"9" * 84 + b"}",
        layout.PREFIX.pack(layout.MAGIC, layout.VERSION, 40) + b'{"tensors":[{"shape":[9223372036854775807]}]}',
        b"GGUF\x03\0\0\0" + b"\xff" * 92,
        b"GGUF\x03\0\0\0" + bytes(8) + b"\xff\xff\xff\x7f" + bytes(80),
        b"AWFR\x01" + b"\xff" * 95,
    ],
    ids=lambda d: f"{d[:4]!r}{len(d)}-{d[8:14].hex()}",
)  # fmt: skip
def test_a_hundred_bytes_cost_no_memory_by_what_they_claim(data: bytes) -> None:
    for target in TARGETS.values():
        tracemalloc.start()
        target(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20
