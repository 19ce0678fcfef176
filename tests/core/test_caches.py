"""The cache folder is where the user or the XDG specification says, and tagged as a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from knotctl.core.caches import cache_folder
from knotctl.core.errors import SourceError


def test_knotctl_cache_dir_goes_before_xdg_and_xdg_before_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KNOTCTL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "knotctl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("models") == tmp_path / "xdg" / "knotctl" / "models"
    monkeypatch.setenv("KNOTCTL_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder("models") == tmp_path / "mine" / "models"
    assert (tmp_path / "mine" / "models").is_dir()


def test_a_relative_xdg_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KNOTCTL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert cache_folder() == tmp_path / "home" / ".cache" / "knotctl"
    assert not (tmp_path / "xdg").exists()


def test_backup_tools_see_that_it_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOTCTL_CACHE_DIR", str(tmp_path / "cache"))
    cache_folder("models")
    tag = (tmp_path / "cache" / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KNOTCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError) as e:
        cache_folder()
    assert e.value.code == "write-failed"
    assert str(tmp_path / "file") in e.value.message
    assert "KNOTCTL_CACHE_DIR" in (e.value.hint or "")
