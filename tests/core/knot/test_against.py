"""A knot is proved to be the encoding of a GGUF, byte for byte, or told where it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import zstandard

from knotctl.cli import main
from knotctl.core.knot.verify import Verification

FIXTURES = Path(__file__).parents[3] / "fixtures"
GGUF = FIXTURES / "tiny-llama.gguf"

Verify = Callable[..., Verification]


@pytest.fixture(scope="module")
def knot(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("against") / "x.knot"
    assert main(["encode", str(GGUF), str(path)]) == 0
    return path.read_bytes()


def test_an_encoding_is_proved(knot: bytes, verified: Verify) -> None:
    result = verified(knot, against=str(GGUF))
    assert (result.findings, result.ok, result.against) == ((), True, str(GGUF))


def test_one_byte_that_differs_is_placed_though_all_digests_hold(
    knot: bytes, make_knots: ModuleType, verified: Verify
) -> None:
    draft = make_knots.Draft.of(knot)
    name, _, _, data = next(t for t in draft.tensors if t[0].endswith("ffn_down_weight"))
    changed = draft.replace(name, data[:77] + bytes([data[77] ^ 8]) + data[78:]).build()
    assert verified(changed, read_data=True).ok
    result = verified(changed, against=str(GGUF))
    assert [(f.code, f.tensor) for f in result.findings] == [("source-mismatch", name)]
    (found,) = result.findings
    assert found.offset is not None
    assert changed[found.offset] == data[77] ^ 8
    assert f"byte 77 of the tensor: expected 0x{data[77]:02x}" in found.message
    assert found.repair is not None
    assert str(GGUF) in found.repair


def test_config_tensors_and_tokenizer_are_compared(knot: bytes, make_knots: ModuleType, verified: Verify) -> None:
    draft = make_knots.Draft.of(knot)
    draft.config = {**draft.config, "ropeTheta": 1.0, "gguf": {**draft.config["gguf"], "general.name": "other"}}
    keys = {"tokenizer.ggml.model": "gpt2"}
    draft.replace("knot_tokenizer", zstandard.ZstdCompressor().compress(json.dumps(keys).encode()))
    draft.tensors[1:1] = [("mine", "I8", [1], b"x")]
    messages = [(f.tensor, f.message) for f in verified(draft.build(), against=str(GGUF)).findings]
    assert ("mine", "in the knot, not in the GGUF") in messages
    assert any(m.startswith("config.ropeTheta: expected ") for _, m in messages)
    assert any(m.startswith("config.gguf.general.name: ") for _, m in messages)
    assert any(t == "knot_tokenizer" and "tokenizer.ggml.tokens" in m for t, m in messages)


def test_a_shape_that_holds_the_same_bytes_differs_all_the_same(
    knot: bytes, make_knots: ModuleType, verified: Verify
) -> None:
    draft = make_knots.Draft.of(knot)
    i = next(i for i, t in enumerate(draft.tensors) if t[0].endswith("ffn_norm_weight"))
    name, kind, shape, data = draft.tensors[i]
    draft.tensors[i] = (name, kind, [1, *shape], data)
    assert [f.tensor for f in verified(draft.build(), against=str(GGUF)).findings] == [name]


def test_another_packing_of_the_same_tokenizer_is_the_same_model(
    knot: bytes, make_knots: ModuleType, verified: Verify
) -> None:
    draft = make_knots.Draft.of(knot)
    text = zstandard.ZstdDecompressor().decompress(draft.data("knot_tokenizer"))
    draft.replace("knot_tokenizer", zstandard.ZstdCompressor(level=1).compress(text))
    assert verified(draft.build(), against=str(GGUF)).ok


def test_a_vocabulary_that_was_cut_by_option_is_the_same_model(
    tmp_path: Path, verified: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["encode", str(GGUF), str(tmp_path / "x.knot"), "--vocab-size", "100"]) == 0
    result = verified((tmp_path / "x.knot").read_bytes(), against=str(GGUF))
    assert result.ok


def test_the_command_takes_one_knot(knot: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.knot").write_bytes(knot)
    (tmp_path / "b.knot").write_bytes(knot)
    assert main(["verify", str(tmp_path / "*.knot"), "--against", str(GGUF)]) == 2
    assert main(["verify", str(tmp_path / "a.knot"), "--against", str(GGUF)]) == 0
    assert f"every tensor as in {GGUF}" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "a.knot"), "--against", str(FIXTURES / "tiny-qwen3.gguf")]) == 1
    assert main(["verify", str(tmp_path / "a.knot"), "--against", str(tmp_path / "a.knot")]) == 3
