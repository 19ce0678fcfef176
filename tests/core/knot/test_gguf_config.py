"""The config of a knot follows the GGUF's keys, and their defaults where they are not given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_ggufs
import pytest
from gguf_bytes import ARRAY, F32, F64, STRING, U8, U32, U64, gguf, key

from knotctl.core.errors import UsageError
from knotctl.core.gguf.parts import open_gguf
from knotctl.core.knot.config import KnotConfig
from knotctl.core.knot.gguf_config import config_of

FIXTURES = Path(make_ggufs.__file__).parent
Config = Callable[..., KnotConfig]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """`config(gguf bytes)` is the config of that model."""

    def read(data: bytes, **options: Any) -> KnotConfig:
        (tmp_path / "x.gguf").write_bytes(data)
        with open_gguf(str(tmp_path / "x.gguf")) as model:
            return config_of(model, **options)

    return read


def test_sizes_are_those_of_the_keys_under_the_contracts_names() -> None:
    with open_gguf(str(FIXTURES / "tiny-qwen3.gguf")) as model:
        document = config_of(model).to_json()
    gguf_keys = document.pop("gguf")
    assert document == {
        "architecture": "qwen3", "hiddenDim": 128, "numLayers": 2, "numHeads": 4, "numKvHeads": 2, "headDim": 64,
        "ffnDim": 192, "vocabSize": 320, "embeddingRows": 320, "contextLength": 512,
        "rmsEps": 9.999999974752427e-07, "ropeTheta": 1000000.0, "ropeDim": 64, "tiedEmbedding": True,
    }  # fmt: skip
    assert isinstance(gguf_keys, dict)
    assert gguf_keys["qwen3.rope.freq_base"] == 1e6


def test_defaults_are_those_of_the_format(config: Config) -> None:
    c = config(make_ggufs.small())
    assert (c.n_kv_heads, c.head_dim, c.rope_dim, c.rope_theta) == (2, 2, 2, 10_000.0)
    assert c.tied_embedding


def test_keys_win_over_defaults(config: Config) -> None:
    c = config(
        make_ggufs.with_key(
            key("llama.attention.head_count_kv", U8, 1),
            key("llama.attention.key_length", U64, 6),
            key("llama.rope.freq_base", F64, 123.5),
            key("llama.rope.dimension_count", U32, 4),
        )
    )
    assert (c.n_kv_heads, c.head_dim, c.rope_dim, c.rope_theta) == (1, 6, 4, 123.5)


def test_a_head_of_its_own_unties_the_embedding(config: Config) -> None:
    head = ("output.weight", (make_ggufs.ROWS, make_ggufs.HIDDEN), make_ggufs.F32_TYPE, bytes(96))
    assert not config(make_ggufs.small([*make_ggufs.tensors(), head])).tied_embedding


def test_heads_need_not_divide_the_width_where_their_own_is_given(config: Config) -> None:
    c = config(
        make_ggufs.small(
            head_count=key("llama.attention.head_count", U32, 3),
            **{"llama.attention.key_length": key("llama.attention.key_length", U32, 2)},
        )
    )
    assert (c.n_heads, c.head_dim) == (3, 2)


def test_the_vocabulary_is_the_option_else_the_key_else_the_tokens_else_the_rows(config: Config) -> None:
    four = key("tokenizer.ggml.tokens", ARRAY, (STRING, list("abcd")))
    five = {"llama.vocab_size": key("llama.vocab_size", U32, 5)}
    assert config(make_ggufs.small(tokens=four, **five), vocab_size=3).vocab_size == 3
    assert config(make_ggufs.small(tokens=four, **five)).vocab_size == 5
    assert config(make_ggufs.small(tokens=four)).vocab_size == 4
    c = config(make_ggufs.small(tokens=None))
    assert (c.vocab_size, c.embedding_rows) == (6, 6)


@pytest.mark.parametrize("size", [0, 7, 1 << 40])
def test_a_vocabulary_that_the_embedding_has_no_rows_for_is_refused(size: int, config: Config) -> None:
    with pytest.raises(UsageError, match="expected 1 to 6") as e:
        config(make_ggufs.small(), vocab_size=size)
    assert e.value.code == "bad-vocab-size"


def test_the_option_mends_a_vocabulary_that_the_file_gets_wrong(config: Config) -> None:
    data = make_ggufs.MODEL["bad-value"]["more tokens than rows"]
    assert config(data, vocab_size=6).vocab_size == 6


def test_of_an_unknown_architecture_what_cannot_be_derived_is_0(config: Config) -> None:
    c = config(
        gguf(
            [
                key("general.architecture", STRING, "other"),
                key("other.attention.head_count", ARRAY, (U32, [4, 8])),
                key("other.embedding_length", U32, 9),
                key("other.attention.layer_norm_rms_epsilon", F32, 0.5),
            ]
        )
    )
    assert (c.architecture, c.n_heads, c.head_dim, c.hidden_size, c.rms_eps) == ("other", 0, 0, 9, 0.5)
    assert (c.embedding_rows, c.vocab_size, c.n_layers) == (0, 0, 0)


def test_of_an_unknown_architecture_the_table_gives_the_width(config: Config) -> None:
    data = make_ggufs.small(
        architecture=key("general.architecture", STRING, "other"),
        **{"other.embedding_length": key("other.embedding_length", U32, 999)},
    )
    c = config(data)
    assert (c.hidden_size, c.embedding_rows, c.vocab_size) == (4, 6, 6)
