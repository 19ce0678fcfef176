"""A knot holds what the GGUF held, in the order of use, and the same GGUF gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_ggufs
import pytest
import zstandard
from gguf import GGUFReader
from gguf_bytes import ARRAY, BOOL, F32, F64, STRING, U16, U32, gguf, key

from knotctl.core.errors import GgufError
from knotctl.core.gguf.names import order_key
from knotctl.core.gguf.parts import open_gguf
from knotctl.core.knot import from_gguf
from knotctl.core.knot.from_gguf import EncodeResult, default_destination, encode_gguf
from knotctl.core.knot.reader import open_knot

FIXTURES = Path(make_ggufs.__file__).parent
MODEL = [(code, case) for code, cases in make_ggufs.MODEL.items() for case in cases]


@pytest.fixture
def encode(tmp_path: Path) -> Callable[..., EncodeResult]:
    """`encode(gguf bytes)` encodes them into tmp_path."""

    def run(data: bytes, **options: Any) -> EncodeResult:
        (tmp_path / "in.gguf").write_bytes(data)
        return encode_gguf(str(tmp_path / "in.gguf"), tmp_path / "out.knot", **options)

    return run


def check_same_as_gguf(knot_path: Path, gguf_path: Path) -> None:
    """Every tensor has the bytes that the reference reader finds, and the file is its header and them."""
    theirs = {t.name: t for t in GGUFReader(gguf_path).tensors}
    with open_knot(str(knot_path)) as knot:
        ours = {e.name: e for e in knot.header.tensors}
        assert set(ours) - {"knot_tokenizer", "knot_digests"} == {n.replace(".", "_") for n in theirs}
        for name, t in theirs.items():
            entry = ours[name.replace(".", "_")]
            assert knot.read(entry.name) == t.data.tobytes(), name
            assert (entry.qtype.name, entry.shape) == (t.tensor_type.name, tuple(reversed(t.shape.tolist())))
        order = sorted(theirs, key=order_key)
        assert [e.name for e in knot.header.tensors] == [
            *(n.replace(".", "_") for n in order), "knot_tokenizer", "knot_digests",
        ]  # fmt: skip
        size = knot_path.stat().st_size
        assert size == knot.header.payload_offset + sum(e.length for e in knot.header.tensors)
        assert knot.header.payload_offset % 2 == 1


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "tiny-qwen3"])
def test_tensors_have_the_bytes_of_the_gguf(name: str, tmp_path: Path) -> None:
    encode_gguf(str(FIXTURES / f"{name}.gguf"), tmp_path / "x.knot")
    check_same_as_gguf(tmp_path / "x.knot", FIXTURES / f"{name}.gguf")


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "tiny-qwen3"])
def test_the_same_gguf_gives_the_same_bytes_wherever_it_lies(name: str, tmp_path: Path) -> None:
    (tmp_path / "copy.gguf").write_bytes((FIXTURES / f"{name}.gguf").read_bytes())
    one = encode_gguf(str(FIXTURES / f"{name}.gguf"), tmp_path / "1.knot", jobs=1)
    two = encode_gguf(str(tmp_path / "copy.gguf"), tmp_path / "2.knot", jobs=3)
    assert one.knot_id == two.knot_id
    assert (tmp_path / "1.knot").read_bytes() == (tmp_path / "2.knot").read_bytes()


def test_a_phase_is_one_range(tmp_path: Path) -> None:
    encode_gguf(str(FIXTURES / "tiny.gguf"), tmp_path / "x.knot")
    with open_knot(str(tmp_path / "x.knot")) as knot:
        names = [e.name for e in knot.header.tensors]
    at = names.index("blk_1_attn_norm_weight")
    assert names[at : at + 12] == [
        f"blk_1_{part}" for part in (
            "attn_norm_weight", "attn_q_weight", "attn_q_bias", "attn_k_weight", "attn_k_bias", "attn_v_weight",
            "attn_v_bias", "attn_output_weight", "ffn_norm_weight", "ffn_gate_weight", "ffn_up_weight",
            "ffn_down_weight",
        )
    ]  # fmt: skip
    assert names[0] == "token_embd_weight"
    assert names[-4:] == ["output_norm_weight", "output_weight", "knot_tokenizer", "knot_digests"]


def test_the_tokenizer_is_that_of_the_gguf(tmp_path: Path) -> None:
    for name in ("tiny", "tiny-llama"):
        encode_gguf(str(FIXTURES / f"{name}.gguf"), tmp_path / f"{name}.knot")
        fields = GGUFReader(FIXTURES / f"{name}.gguf").fields
        with open_knot(str(tmp_path / f"{name}.knot")) as knot:
            assert knot.tokenizer_keys() == {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
            frame = knot.read("knot_tokenizer")
        assert zstandard.frame_content_size(frame) == len(zstandard.decompress(frame))


def test_a_frozen_knot_is_still_what_we_write(tmp_path: Path) -> None:
    """fixtures/tiny-llama.knot was written once: files in the field must go on being what the encoder makes.

    The version's name and what zstd packs the tokenizer into may differ, and with them its digests.
    """
    encode_gguf(str(FIXTURES / "tiny-llama.gguf"), tmp_path / "x.knot")
    with open_knot(str(FIXTURES / "tiny-llama.knot")) as old, open_knot(str(tmp_path / "x.knot")) as new:
        ours = {"knot_tokenizer", "knot_digests"}
        assert [e for e in old.header.tensors if e.name not in ours] == [
            e for e in new.header.tensors if e.name not in ours
        ]
        assert old.header.config == new.header.config
        assert old.header.source == new.header.source
        assert old.tokenizer_keys() == new.tokenizer_keys()
        assert old.read("blk_1_ffn_down_weight") == new.read("blk_1_ffn_down_weight")


@pytest.mark.parametrize(("code", "case"), MODEL, ids=[f"{code}: {case}" for code, case in MODEL])
def test_a_model_that_lacks_something_is_refused_by_name_and_leaves_nothing(
    code: str, case: str, encode: Callable[..., EncodeResult], tmp_path: Path
) -> None:
    with pytest.raises(GgufError) as e:
        encode(make_ggufs.MODEL[code][case])
    assert e.value.code == code
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_the_first_missing_tensor_is_named(encode: Callable[..., EncodeResult]) -> None:
    tensors = [t for t in make_ggufs.tensors(9) if t[0] not in ("blk.7.ffn_up.weight", "blk.8.attn_q.weight")]
    with pytest.raises(GgufError, match=r"tensor blk\.7\.ffn_up\.weight: missing"):
        encode(make_ggufs.small(tensors, block_count=key("llama.block_count", U32, 9)))


def test_an_architecture_we_cannot_run_is_encoded_with_a_warning(encode: Callable[..., EncodeResult]) -> None:
    done = encode(gguf([key("general.architecture", STRING, "mamba"), key("mamba.block_count", U32, 7)]))
    assert done.config.n_layers == 7
    assert done.config.hidden_size == 0
    assert done.tensors == 2
    assert done.warnings[0].startswith("architecture mamba: ")


def test_a_mixture_of_experts_is_encoded_though_it_lacks_the_tensors_of_a_dense_model(
    encode: Callable[..., EncodeResult],
) -> None:
    dense = [t for t in make_ggufs.tensors() if "ffn_up" not in t[0]]
    data = make_ggufs.small(dense, **{"llama.expert_count": key("llama.expert_count", U32, 8)})
    assert encode(data).tensors == 10 + 2


def test_the_result_says_what_was_written(encode: Callable[..., EncodeResult], tmp_path: Path) -> None:
    done = encode(make_ggufs.small())
    with open_knot(str(tmp_path / "out.knot")) as knot:
        assert (done.knot_id, done.payload_offset) == (knot.id, knot.header.payload_offset)
        assert (done.file_bytes, done.tensors) == (knot.source.size, len(knot.header.tensors))
    assert done.bytes_by_type == {"F32": sum(len(t[3]) for t in make_ggufs.tensors())}
    assert done.warnings == ()


def test_work_is_counted_before_it_is_done(tmp_path: Path) -> None:
    done: list[int] = []
    with open_gguf(str(FIXTURES / "tiny.gguf")) as model:
        from_gguf.encode_model(model, tmp_path / "x.knot", advance=done.append)
        total = from_gguf.work_bytes(model)
    assert total <= sum(done) <= total * 1.02


def test_tokenizer_values_keep_their_kind(encode: Callable[..., EncodeResult], tmp_path: Path) -> None:
    encode(
        make_ggufs.with_key(
            key("tokenizer.ggml.flags", ARRAY, (BOOL, [True, False])),
            key("tokenizer.ggml.scores", ARRAY, (F32, [0.1, -1e30])),
            key("tokenizer.ggml.ids", ARRAY, (U16, [65_535])),
            key("tokenizer.ggml.add_bos_token", BOOL, True),
            key("tokenizer.chat_template.tool_use", STRING, "{{ x }} 😀 \u2028"),
        )
    )
    with open_knot(str(tmp_path / "out.knot")) as knot:
        keys = knot.tokenizer_keys()
        raw = json.loads(zstandard.decompress(knot.read("knot_tokenizer")))
    assert keys == raw
    assert keys["tokenizer.ggml.flags"] == [True, False]
    assert keys["tokenizer.ggml.scores"] == [0.10000000149011612, -1.0000000150474662e30]
    assert keys["tokenizer.ggml.ids"] == [65_535]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.chat_template.tool_use"] == "{{ x }} 😀 \u2028"


def test_a_tokenizer_over_the_cap_is_refused(
    encode: Callable[..., EncodeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_gguf, "TOKENIZER_CAP", 100)
    encode(make_ggufs.small())
    with pytest.raises(GgufError) as e:
        encode(make_ggufs.with_key(key("tokenizer.chat_template", STRING, "x" * 100)), force=True)
    assert e.value.code == "tokenizer-too-large"


def test_scalars_of_the_gguf_are_in_the_config_unknown_ones_too(encode: Callable[..., EncodeResult]) -> None:
    added = [
        key("general.note", STRING, "ünknown"),
        key("x.y.z", F64, 0.1),
        key("x.flag", BOOL, False),
        key("x.list", ARRAY, (U32, [1])),
        key("tokenizer.ggml.model", STRING, "gpt2"),
        key("tokenizer.chat_template", STRING, "{{ x }}"),
    ]
    found = encode(make_ggufs.with_key(*added)).config.gguf
    assert (found["general.note"], found["x.y.z"], found["x.flag"]) == ("ünknown", 0.1, False)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["llama.context_length"] == 64
    assert not {"x.list", "tokenizer.ggml.tokens", "tokenizer.chat_template"} & set(found)


@pytest.mark.parametrize(
    ("src", "dest"),
    [
        ("a/model.gguf", "a/model.knot"),
        ("model.Q4_K_M.gguf", "model.Q4_K_M.knot"),
        ("model", "model.knot"),
        ("a/model-00002-of-00003.gguf", "a/model.knot"),
        ("https://host/x/model.gguf", "model.knot"),
    ],
)
def test_the_default_name_is_the_sources_with_another_suffix(src: str, dest: str) -> None:
    assert default_destination(src) == Path(dest)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "coder-1.5b"])
def test_a_real_model_is_the_same_twice_and_as_the_reference_reader_finds_it(
    name: str, gguf_of: Callable[[str], Path], knot_of: Callable[[str], Path], tmp_path: Path
) -> None:
    check_same_as_gguf(knot_of(name), gguf_of(name))
    again = tmp_path / "again.knot"
    encode_gguf(str(gguf_of(name)), again)
    assert again.stat().st_size == knot_of(name).stat().st_size
    with again.open("rb") as a, knot_of(name).open("rb") as b:
        while piece := a.read(1 << 24):
            assert piece == b.read(1 << 24)
