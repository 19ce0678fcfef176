"""How fast each stage of the data path is, on a real model (smollm2): from the file to the sampled token.

`pytest tests/benchmarks/bench_stages.py --benchmark-only`; how two versions are compared: README, Performance.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knotctl.core.knot.from_gguf import encode_gguf
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.knot.verify import verify_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.embed import Shard
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.tokens.sampler import SamplingParams, sample
from knotctl.core.tokens.tokenizer import load_tokenizer
from knotctl.core.wire.frame import Frame, Segment, encode_frame, parse_frame
from knotctl.core.wire.layout import Kind, Mode
from knotctl.core.wire.merge import merge_partials

pytestmark = pytest.mark.model
SESSION = bytes(16)


@pytest.fixture
def knot(knot_of: Callable[[str], Path]) -> Iterator[Knot]:
    with open_knot(str(knot_of("smollm2"))) as opened:
        yield opened


def tokens(knot: Knot, count: int, position: int = 0) -> Frame:
    ids = np.random.default_rng(1).integers(0, 40_000, (count, 1), np.int32)
    mode = Mode.PREFILL if count > 1 else Mode.DECODE
    return Frame(Kind.TOKENS, bytes.fromhex(knot.id), (Segment(SESSION, position, count, mode),), ids)


def hidden(knot: Knot, count: int, position: int = 0, logits: str = "none") -> Frame:
    x = np.random.default_rng(2).standard_normal((count, knot.header.config.hidden_size)).astype(np.float32)
    asked = tokens(knot, count, position)
    return Frame(Kind.HIDDEN, asked.knot_id, asked.segments, x, {"logits": logits})


def test_encode(benchmark: Any, gguf_of: Callable[[str], Path], tmp_path: Path) -> None:
    gguf = gguf_of("smollm2")
    benchmark(encode_gguf, str(gguf), str(tmp_path / "out.knot"), force=True)


def test_encode_peer_copy_and_sha256(benchmark: Any, gguf_of: Callable[[str], Path], tmp_path: Path) -> None:
    def copy() -> None:
        shutil.copyfile(gguf_of("smollm2"), tmp_path / "copy")
        with (tmp_path / "copy").open("rb") as f:
            hashlib.file_digest(f, "sha256")

    benchmark(copy)


@pytest.mark.parametrize("data", [False, True], ids=["header", "read-data"])
def test_verify(benchmark: Any, knot: Knot, data: bool) -> None:
    assert benchmark(verify_knot, knot.source, read_data=data).findings == ()


@pytest.mark.parametrize("count", [1, 512])
def test_shards_and_merge(benchmark: Any, knot: Knot, count: int) -> None:
    vocab_size = knot.header.config.vocab_size
    shards = [Shard(knot, VocabSpan.shard(i, 8, vocab_size)) for i in range(8)]
    asked = tokens(knot, count)
    benchmark(lambda: merge_partials([s.embed(asked) for s in shards]))


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("count", [1, 512])
def test_frame_there_and_back(benchmark: Any, knot: Knot, count: int, compress: bool) -> None:
    frame = hidden(knot, count)
    benchmark(lambda: parse_frame(encode_frame(frame, compress=compress)))


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.FLUID])
@pytest.mark.parametrize(("count", "position"), [(1, 128), (1, 4000), (8, 128), (512, 0)])
def test_station(benchmark: Any, knot: Knot, residency: Residency, count: int, position: int) -> None:
    """All layers, without the head."""
    station = Station(knot, StationSpec(LayerSpan(0, knot.header.config.n_layers), residency))
    for start in range(0, position, 500):
        station.forward(hidden(knot, min(500, position - start), start))
    frame = hidden(knot, count, position)
    benchmark(station.forward, frame)


def test_head(benchmark: Any, knot: Knot) -> None:
    """The last layer and the logits of one token."""
    n_layers = knot.header.config.n_layers
    station = Station(knot, StationSpec(LayerSpan(n_layers - 1, n_layers), Residency.RESIDENT))
    benchmark(station.forward, hidden(knot, 1, 0, "last"))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1)],
    ids=["greedy", "top-k-top-p"],
)
def test_sample(benchmark: Any, params: SamplingParams) -> None:
    """Over as many logits as Qwen has."""
    logits = np.random.default_rng(3).standard_normal(151_936).astype(np.float32)
    benchmark(sample, logits, params, 7)


def test_tokenize(benchmark: Any, knot: Knot) -> None:
    tokenizer = load_tokenizer(knot.tokenizer_keys())
    text = Path(__file__).read_text()
    benchmark(tokenizer.encode, text)
