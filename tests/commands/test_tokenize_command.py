"""`knotctl tokenize` prints what scripts rely on, from a knot alone, and refuses in words."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knotctl.cli import main

CHAT = [{"role": "user", "content": "the <s>ion"}]


@pytest.fixture
def knot(tiny: Callable[[str], Path]) -> str:
    return str(tiny("tiny-llama"))


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def report(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert main(["tokenize", *argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_json_has_ids_pieces_and_no_prompt(capsys: pytest.CaptureFixture[str], knot: str) -> None:
    plain = report(capsys, knot, "the <s>é")
    assert set(plain) == {"tokens", "pieces", "prompt"} and plain["prompt"] is None
    assert len(plain["tokens"]) == len(plain["pieces"])
    assert plain["pieces"][0] == " the" and plain["pieces"][-2:] == ["\\xc3", "\\xa9"]
    assert 1 not in plain["tokens"]
    special = report(capsys, knot, "the <s>é", "--special", "--bos")
    assert special["tokens"].count(1) == 2 and special["pieces"][0] == "<s>"
    assert report(capsys, knot, "the", "--bos")["tokens"] == [1, *report(capsys, knot, "the")["tokens"]]
    assert report(capsys, knot, "")["tokens"] == []


def test_stdin_is_taken_as_it_is(
    capsys: pytest.CaptureFixture[str], knot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "the é\n\r\n\x00".encode())
    assert report(capsys, knot, "-") == report(capsys, knot, "the é\n\r\n\x00")
    typed(monkeypatch, b"ab\xff")
    error = report(capsys, knot, "-", status=2)["error"]
    assert error["code"] == "bad-text" and "byte 2: expected UTF-8, found 0xFF" in error["message"]


@pytest.mark.parametrize("document", [CHAT, {"messages": CHAT, "model": "m"}], ids=["list", "request"])
def test_chat_applies_the_template_and_leaves_what_was_typed_as_text(
    capsys: pytest.CaptureFixture[str], knot: str, tmp_path: Path, document: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "messages.json").write_text(json.dumps(document))
    chat = report(capsys, knot, "--chat", str(tmp_path / "messages.json"))
    assert chat["prompt"] == "<|im_start|>user\nthe <s>ion<|im_end|>\n<|im_start|>assistant\n"
    assert chat["tokens"].count(1) == 1 and chat["tokens"][0] == 1
    typed(monkeypatch, json.dumps(document).encode())
    assert report(capsys, knot, "--chat", "-") == chat


def test_people_see_one_token_a_line_quoted_and_escaped(capsys: pytest.CaptureFixture[str], knot: str) -> None:
    assert main(["tokenize", knot, "the\x1b\né"]) == 0
    out, err = capsys.readouterr()
    assert [line.split(maxsplit=1)[1] for line in out.splitlines()] == [
        "' the'",
        r"'\x1b'",
        r"'\n'",
        r"b'\xc3'",
        r"b'\xa9'",
    ]
    assert "\x1b" not in out and err == "5 tokens\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a TEXT or --chat"),
        (["a", "--chat", "-"], "give a TEXT or --chat"),
        (["--chat", "-", "--special"], "--bos and --special are for a TEXT"),
        (["a\udcff"], "text: character 1: expected Unicode text, found the lone surrogate U+DCFF"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], knot: str, argv: list[str], message: str
) -> None:
    assert main(["tokenize", knot, *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "bad-json"),
        (b"[", "bad-json"),
        (b'[{"role": "user", "role": "user", "content": ""}]', "duplicate-key"),
        (b'[{"role": "user", "content": "\\ud800"}]', "bad-json"),
        (b"{}", "bad-messages"),
        (b"[]", "bad-messages"),
        (b'[{"role": "user", "content": 1}]', "bad-messages"),
    ],
)
def test_messages_that_are_none_are_refused(
    capsys: pytest.CaptureFixture[str], knot: str, tmp_path: Path, document: bytes, message: str
) -> None:
    (tmp_path / "m.json").write_bytes(document)
    assert report(capsys, knot, "--chat", str(tmp_path / "m.json"), status=2)["error"]["code"] == message


def test_an_absent_knot_or_file_cannot_be_had(capsys: pytest.CaptureFixture[str], knot: str, tmp_path: Path) -> None:
    assert main(["tokenize", str(tmp_path / "absent.knot"), "a"]) == 4
    assert main(["tokenize", knot, "--chat", str(tmp_path / "absent.json")]) == 4
    err = capsys.readouterr().err
    assert "absent.knot" in err and "absent.json" in err
