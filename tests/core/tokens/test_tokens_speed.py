"""How quick the tokenisers and the sampler are; runs with `pytest --benchmark-only`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knotctl.core.gguf.parts import open_gguf
from knotctl.core.knot.from_gguf import pack_tokenizer
from knotctl.core.knot.reader import unpack_tokenizer
from knotctl.core.tokens.sampler import SamplingParams, sample
from knotctl.core.tokens.tokenizer import load_tokenizer

MODELS = ("coder-1.5b", "gemma3-270m")
TEXT = (Path(__file__).parent / "test_sampler.py").read_text()
MEGABYTE = (TEXT * (1_000_000 // len(TEXT) + 1))[:1_000_000]


def keys(path: Path) -> dict[str, Any]:
    with open_gguf(str(path)) as model:
        return unpack_tokenizer(pack_tokenizer(model))


@pytest.mark.model
@pytest.mark.parametrize("name", MODELS)
def test_load(benchmark: Any, name: str, gguf_of: Callable[[str], Path]) -> None:
    benchmark(load_tokenizer, keys(gguf_of(name)))


@pytest.mark.model
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", [MEGABYTE, "a" * 1_000_000], ids=["code", "one-word"])
def test_encode_a_megabyte(benchmark: Any, name: str, text: str, gguf_of: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(keys(gguf_of(name)))
    benchmark.pedantic(tokenizer.encode, args=(text,), rounds=3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(top_k=40, top_p=0.95),
        SamplingParams(temperature=0, logprobs=20),
    ],
    ids=["greedy", "all", "top-p", "top-k", "logprobs"],
)
def test_sample_of_152_thousand(benchmark: Any, params: SamplingParams) -> None:
    logits = (np.random.default_rng(0).standard_normal(151_936) * 3).astype(np.float32)
    benchmark(sample, logits, params, 0, [1, 2, 3])
