"""`encode` from the shell: what it prints, its exit status, and that being stopped leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import make_ggufs
import pytest
from gguf_bytes import STRING, U32, gguf, info, key

from knotctl.cli import main

FIXTURES = Path(make_ggufs.__file__).parent
TINY = str(FIXTURES / "tiny-llama.gguf")
Output = pytest.CaptureFixture[str]


def knotctl(*args: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "knotctl", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )  # type: ignore[call-overload,no-any-return]


def test_a_knot_in_a_gguf_s_place_is_said_to_be_encoded_already(tmp_path: Path, capsys: Output) -> None:
    assert main(["encode", str(FIXTURES / "tiny-llama.knot"), str(tmp_path / "again.knot")]) == 3
    assert "found a knot, which is encoded already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A GGUF of 8 GiB of zeros: a hole in the file, and far more than a test waits for."""
    head = gguf([key("general.architecture", STRING, "hole")], [info("hole", [1 << 31], 0, 0)])
    path = tmp_path / "large.gguf"
    path.write_bytes(head)
    os.truncate(path, len(head) + (8 << 30))
    return path


def test_json_is_the_contracts(tmp_path: Path, capsys: Output) -> None:
    dest = tmp_path / "x.knot"
    assert main(["encode", TINY, str(dest), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("seconds") >= 0
    assert main(["verify", str(dest), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert document == {
        "knot": str(dest),
        "bytes": dest.stat().st_size,
        "knot_id": found["knot_id"],
        "payload_offset": found["payload_offset"],
        "tensors": 23,
    }


def test_people_get_a_summary(tmp_path: Path, capsys: Output) -> None:
    assert main(["encode", TINY, str(tmp_path / "x.knot")]) == 0
    out = capsys.readouterr().out
    assert "llama, 2 layers, hidden 96, vocabulary 420" in out
    assert "Q8_0 70.5 KiB" in out


def test_the_knot_lies_beside_the_gguf_where_no_name_is_given(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(make_ggufs.small())
    assert main(["encode", str(tmp_path / "model.gguf")]) == 0
    assert (tmp_path / "model.knot").exists()


def test_an_existing_knot_is_kept_unless_forced(tmp_path: Path, capsys: Output) -> None:
    dest = tmp_path / "x.knot"
    dest.write_bytes(b"old")
    assert main(["encode", TINY, str(dest)]) == 2
    assert "exists already\n  hint: --force" in capsys.readouterr().err
    assert dest.read_bytes() == b"old"
    assert main(["encode", TINY, str(dest), "--force"]) == 0
    assert dest.read_bytes().startswith(b"KNOT")


def test_an_existing_knot_is_refused_before_the_gguf_is_looked_at(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "x.knot").write_bytes(b"old")
    assert main(["encode", str(tmp_path / "none.gguf"), str(tmp_path / "x.knot"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "exists"


def test_a_gguf_is_not_replaced_by_its_knot(tmp_path: Path, capsys: Output) -> None:
    src = tmp_path / "model.gguf"
    src.write_bytes(make_ggufs.small())
    (tmp_path / "link.knot").symlink_to(src)
    for dest in (src, tmp_path / "link.knot"):
        assert main(["encode", str(src), str(dest), "--force", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "same-file"
    assert src.read_bytes() == make_ggufs.small()


@pytest.mark.parametrize(
    ("src", "status", "code"),
    [
        (FIXTURES / "ggufs" / "overlap.gguf", 3, "overlap"),
        (FIXTURES / "ggufs" / "missing-tensor.gguf", 3, "missing-tensor"),
        (FIXTURES / "tiny-llama.knot", 3, "not-a-gguf"),
        (FIXTURES / "none.gguf", 4, "not-found"),
        (FIXTURES, 4, "not-a-file"),
        ("ftp://host/x.gguf", 2, "unsupported-scheme"),
    ],
)
def test_what_cannot_be_encoded_has_a_status_and_a_code(
    src: Path, status: int, code: str, tmp_path: Path, capsys: Output
) -> None:
    assert main(["encode", str(src), str(tmp_path / "x.knot"), "--json"]) == status
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == code
    assert err.startswith(f"knotctl: {src}: ")
    assert not list(tmp_path.iterdir())


def test_vocab_size_makes_the_other_rows_padding(tmp_path: Path, capsys: Output) -> None:
    dest = tmp_path / "x.knot"
    assert main(["encode", TINY, str(dest), "--vocab-size", "400"]) == 0
    assert main(["verify", str(dest)]) == 0
    assert "padded-vocabulary" in capsys.readouterr().out
    assert main(["encode", TINY, str(dest), "--vocab-size", "421", "--force"]) == 2


def test_an_architecture_that_cannot_run_is_encoded_with_a_warning(tmp_path: Path, capsys: Output) -> None:
    src = tmp_path / "x.gguf"
    src.write_bytes(gguf([key("general.architecture", STRING, "a\x1b[31m"), key("n", U32, 1)]))
    assert main(["encode", str(src), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "knotctl: warning: architecture a\\x1b[31m: " in err
    assert json.loads(out)["tensors"] == 2


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_being_stopped_leaves_the_old_knot_and_nothing_else(stop: signal.Signals, large: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "x.knot").write_bytes(b"old")
    process = knotctl("encode", str(large), str(folder / "x.knot"), "--force")
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(stop)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == [("x.knot", b"old")]


def test_a_file_that_may_not_grow_so_large_is_not_left_half_written(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = knotctl("encode", TINY, str(tmp_path / "x.knot"), preexec_fn=limit)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "cannot write: File too large" in err) == (4, True), err
    assert not list(tmp_path.iterdir())


@pytest.mark.model
def test_a_model_is_encoded_in_a_quarter_of_its_memory(gguf_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Encoding 1.1 GB takes less than 250 MB at the peak: the vocabulary is what is held, never a tensor."""
    script = (
        "import sys; from knotctl.cli import main; status = main(sys.argv[1:])\n"
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]); sys.exit(status)"
    )
    args = [sys.executable, "-c", script, "encode", str(gguf_of("coder-1.5b")), str(tmp_path / "x.knot"), "--json"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout.splitlines()[-1]) < 250_000


def test_a_dry_run_shows_the_layout_that_an_encoding_has_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dest = str(FIXTURES / "tiny.gguf"), tmp_path / "x.knot"
    assert main(["encode", "--dry-run", "--json", src, str(dest)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["encode", "--dry-run", src, str(dest)]) == 0
    assert "A station holds" in capsys.readouterr().out
    assert not dest.exists()
    assert main(["encode", src, str(dest)]) == 0
    capsys.readouterr()
    assert main(["inspect", "--json", str(dest)]) == 0
    is_so = json.loads(capsys.readouterr().out)
    assert told["file_bytes"] == is_so["file_bytes"] == dest.stat().st_size
    for field in ("payload_offset", "payload_bytes", "parts", "config"):
        assert told[field] == is_so[field]
    assert [t | {"sha256": None} for t in is_so["tensors"]] == told["tensors"]
    phases = [p["largest"] for p in is_so["parts"] if p["part"] in ("attn", "ffn_gate", "ffn_up", "ffn_down")]
    assert told["station_weight_bytes"] == max(phases)
