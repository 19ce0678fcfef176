"""A fetched file is whole, right and of one object; a fetch that is cut off goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_doubles import FaultyStore

from knotctl.cli import main
from knotctl.core.errors import KnotctlError, SourceError
from knotctl.core.source import fetch
from knotctl.core.source.fetch import Fetched, fetch_object, file_name
from knotctl.core.source.opening import open_source

FIXTURES = Path(__file__).parents[3] / "fixtures"
KNOTS = FIXTURES / "knots"
PIECE = 1 << 16
DATA = b"".join(hashlib.sha256(i.to_bytes(4)).digest() for i in range(10 * PIECE // 32 + 7))
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces and first answers so small that a test's object is of many."""
    monkeypatch.setattr("knotctl.core.source.ranged.HEAD_BYTES", 4096)
    monkeypatch.setattr(fetch, "PIECE_BYTES", PIECE)
    yield


def fetched(ref: str, dest: Path, advance: Callable[[int], None] = lambda _: None, **options: object) -> Fetched:
    source = open_source(ref)
    try:
        return fetch_object(source, dest, advance, **options)  # type: ignore[arg-type]
    finally:
        source.close()


def cut_off(ref: str, dest: Path, pieces: int) -> None:
    """Fetch so many pieces, then be interrupted."""
    left = [pieces]

    def advance(_: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetched(ref, dest, advance)
    assert not dest.exists()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_all_bytes_arrive_and_nothing_else(faulty: FaultyStore, tmp_path: Path) -> None:
    url = faulty.put("x", DATA)
    steps: list[int] = []
    done = fetched(url, tmp_path / "x", steps.append, sha256=DIGEST.upper())
    assert done == Fetched(tmp_path / "x", len(DATA), DIGEST, 0)
    assert (tmp_path / "x").read_bytes() == DATA
    assert sum(steps) == len(DATA)
    assert names(tmp_path) == ["x"]


def test_a_fetch_that_is_cut_off_goes_on_where_it_was(faulty: FaultyStore, tmp_path: Path) -> None:
    url = faulty.put("x", DATA)
    cut_off(url, tmp_path / "x", 6)
    (part,) = tmp_path.iterdir()
    with part.open("r+b") as f:  # what a crash leaves of a piece that had not reached the disk
        f.seek(-PIECE // 2, 2)
        f.write(bytes(PIECE // 2))
    faulty.requests.clear()
    steps: list[int] = []
    done = fetched(url, tmp_path / "x", steps.append)
    assert (done.resumed_at, done.sha256) == (5 * PIECE, DIGEST)
    assert len(faulty.requests) == 1 + 6
    assert (tmp_path / "x").read_bytes() == DATA
    assert sum(steps) == len(DATA)
    assert names(tmp_path) == ["x"]


def test_of_another_object_nothing_is_taken_up_and_nothing_left(faulty: FaultyStore, tmp_path: Path) -> None:
    cut_off(faulty.put("x", DATA), tmp_path / "x", 6)
    url = faulty.put("x", DATA[::-1])
    assert fetched(url, tmp_path / "x").resumed_at == 0
    assert (tmp_path / "x").read_bytes() == DATA[::-1]
    assert names(tmp_path) == ["x"]


def test_an_object_without_a_validator_is_never_taken_up(faulty: FaultyStore, tmp_path: Path) -> None:
    faulty.validators = False
    url = faulty.put("x", DATA)
    cut_off(url, tmp_path / "x", 6)
    assert fetched(url, tmp_path / "x").resumed_at == 0
    assert names(tmp_path) == ["x"]


def test_what_has_another_digest_or_is_refused_is_thrown_away(faulty: FaultyStore, tmp_path: Path) -> None:
    def refuse(_: Path) -> None:
        raise SourceError("no", "no")

    url = faulty.put("x", DATA)
    (tmp_path / "x").write_bytes(b"old")
    for options, code in (({"sha256": "0" * 64}, "digest-mismatch"), ({"check": refuse}, "no")):
        with pytest.raises(KnotctlError) as e:
            fetched(url, tmp_path / "x", **options)
        assert e.value.code == code
        assert (tmp_path / "x").read_bytes() == b"old"
        assert names(tmp_path) == ["x"]


def test_two_do_not_fetch_into_one_file(faulty: FaultyStore, tmp_path: Path) -> None:
    url = faulty.put("x", DATA)
    cut_off(url, tmp_path / "x", 6)
    (part,) = tmp_path.iterdir()
    with part.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SourceError) as e:
            fetched(url, tmp_path / "x")
        assert e.value.code == "fetch-in-progress"
        # nor is it taken from under the feet of one who fetches what the name stood for before
        fetched(faulty.put("x", DATA[::-1]), tmp_path / "x")
        assert part.exists()


def test_a_folder_that_is_not_there_is_an_error(faulty: FaultyStore, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as e:
        fetched(faulty.put("x", DATA), tmp_path / "none" / "x")
    assert e.value.code == "write-failed"


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("http://h/a/b.gguf?x=1#y", "b.gguf"),
        ("s3://bucket/k/m%20x.knot", "m x.knot"),
        ("hf://o/r/f.gguf", "f.gguf"),
        ("http://h/", None),
        ("http://h/..", None),
        ("http://h/%2e%2e", None),
        ("http://h/a%2Fb", None),
        ("http://h/a%00b", None),
        ("http://h/%1b[31m", None),
        ("http://h/" + "a" * 300, None),
    ],
)
def test_a_file_is_named_after_the_url_only_where_that_names_one(ref: str, name: str | None) -> None:
    if name is not None:
        assert file_name(ref) == name
        return
    with pytest.raises(KnotctlError) as e:
        file_name(ref)
    assert e.value.code == "bad-name"


def test_pull_checks_what_it_fetched(faulty: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty.put("small.knot", (KNOTS / "small.knot").read_bytes())
    assert main(["pull", "s3://models/small.knot", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'small.knot'}\n"
    assert (tmp_path / "small.knot").read_bytes() == (KNOTS / "small.knot").read_bytes()
    gguf = (FIXTURES / "tiny-llama.gguf").read_bytes()
    for name, data, status, code in (
        ("digest-mismatch.knot", (KNOTS / "digest-mismatch.knot").read_bytes(), 3, "digest-mismatch"),
        ("cut.gguf", gguf[:-1], 3, None),
        ("page.gguf", b"<!DOCTYPE html><p>Sign in", 3, "unknown-format"),
        ("empty.gguf", b"", 3, "unknown-format"),
    ):
        assert main(["pull", faulty.put(name, data), str(tmp_path / name), "--json"]) == status
        out, err = capsys.readouterr()
        assert code in (None, json.loads(out)["error"]["code"])
        assert name in err
        assert names(tmp_path) == ["small.knot"]


def test_pull_replaces_only_by_force_and_fetches_only_what_is_not_right(
    faulty: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (FIXTURES / "tiny-llama.gguf").read_bytes()
    url, dest, digest = faulty.put("m.gguf", data), tmp_path / "m.gguf", hashlib.sha256(data).hexdigest()
    dest.write_bytes(b"mine")
    assert main(["pull", url, str(dest)]) == 2
    assert "--force" in capsys.readouterr().err
    assert dest.read_bytes() == b"mine"
    assert main(["pull", url, str(dest), "--force"]) == 0
    assert dest.read_bytes() == data
    capsys.readouterr()
    faulty.requests.clear()
    assert main(["pull", url, str(dest), "--sha256", digest, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ref": url, "path": str(dest), "bytes": len(data), "sha256": digest}
    assert len(faulty.requests) == 1


def test_pull_keeps_what_it_fetched_in_the_cache_until_the_object_changes(
    faulty: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNOTCTL_CACHE_DIR", str(tmp_path))
    paths = []
    for data in (b"tiny-llama", b"tiny-llama", b"tiny-qwen3"):
        url = faulty.put("m.gguf", (FIXTURES / f"{data.decode()}.gguf").read_bytes())
        assert main(["pull", url]) == 0
        paths.append(Path(capsys.readouterr().out.rstrip("\n")))
    assert paths[0] == paths[1] != paths[2]
    assert [p.name for p in paths] == ["m.gguf"] * 3
    assert paths[2].read_bytes() == (FIXTURES / "tiny-qwen3.gguf").read_bytes()


def test_pull_reads_stores_of_others(s3: Callable[[str, bytes], str], tmp_path: Path) -> None:
    data = (KNOTS / "small.knot").read_bytes()
    assert main(["pull", s3("small.knot", data), str(tmp_path / "x.knot")]) == 0
    assert (tmp_path / "x.knot").read_bytes() == data
