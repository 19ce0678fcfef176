"""A ref is a path or a URL of a scheme we know; patterns are for paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from knotctl.core.errors import UsageError
from knotctl.core.source.opening import expand_refs, open_source


@pytest.mark.parametrize("ref", ["ftp://host/x", "file:///x", "S4://bucket/key"])
def test_an_unknown_scheme_is_refused(ref: str) -> None:
    with pytest.raises(UsageError) as e:
        open_source(ref)
    assert e.value.code == "unsupported-scheme"


def test_a_path_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a:b").write_bytes(b"x")
    source = open_source(str(tmp_path / "a:b"))
    assert source.read(0, 1) == b"x"
    source.close()


def test_patterns_become_the_paths_that_match_in_order(tmp_path: Path) -> None:
    for name in ("b.knot", "a.knot", "sub/c.knot", "x.txt", "[1].knot"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    pattern, deep = str(tmp_path / "*.knot"), str(tmp_path / "**" / "c*")
    literal = str(tmp_path / "[1].knot")
    assert expand_refs([pattern]) == [literal, str(tmp_path / "a.knot"), str(tmp_path / "b.knot")]
    assert expand_refs([deep, "none", "s3://b/*"]) == [str(tmp_path / "sub" / "c.knot"), "none", "s3://b/*"]
    assert expand_refs([literal]) == [literal]
    with pytest.raises(UsageError) as e:
        expand_refs([str(tmp_path / "*.gguf")])
    assert e.value.code == "no-match"
