"""A split GGUF is the model that was cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_ggufs
import pytest
from gguf_bytes import I32, U16, gguf, key, lay_out

from knotctl.core.errors import GgufError, SourceError
from knotctl.core.gguf.parts import open_gguf
from knotctl.core.knot.from_gguf import encode_gguf

Split = Callable[..., Path]


def part(index: int, count: int, tensors: list[make_ggufs.Tensor], total: int | None, no: int | None = None) -> bytes:
    keys = list(make_ggufs.keys().values()) if index == 0 else []
    keys += [key("split.no", U16, index if no is None else no), key("split.count", U16, count)]
    keys += [] if total is None else [key("split.tensors.count", I32, total)]
    infos, data = lay_out(tensors)
    return gguf(keys, infos, data)


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """`split(3)` writes the smallest llama in three parts and returns the first."""

    def write(count: int, total: int | None = 11, swap: bool = False, twice: bool = False) -> Path:
        tensors = make_ggufs.tensors()
        for i in range(count):
            some = tensors[i::count] + (tensors[:1] if twice and i else [])
            no = {1: 2, 2: 1}.get(i, i) if swap else i
            path = tmp_path / f"small-{i + 1:05}-of-{count:05}.gguf"
            path.write_bytes(part(i, count, some, total, no))
        return tmp_path / f"small-00001-of-{count:05}.gguf"

    return write


def refused(path: Path) -> GgufError:
    with pytest.raises(GgufError) as e:
        open_gguf(str(path))
    return e.value


@pytest.mark.parametrize("count", [2, 3, 11])
def test_a_split_model_gives_the_knot_of_the_whole(count: int, split: Split, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(make_ggufs.small())
    encode_gguf(str(whole), tmp_path / "whole.knot")
    encode_gguf(str(split(count)), tmp_path / "split.knot")
    assert (tmp_path / "split.knot").read_bytes() == (tmp_path / "whole.knot").read_bytes()


def test_any_part_names_the_model(split: Split, tmp_path: Path) -> None:
    split(3)
    with open_gguf(str(tmp_path / "small-00003-of-00003.gguf")) as model:
        assert len(model.tensors) == 11
        assert "general.architecture" in model.metadata
        assert not [k for k in model.metadata if k.startswith("split.")]


def test_a_part_that_is_not_there_is_named(split: Split, tmp_path: Path) -> None:
    first = split(3)
    (tmp_path / "small-00002-of-00003.gguf").unlink()
    with pytest.raises(SourceError, match=r"small-00002-of-00003\.gguf: no such file") as e:
        open_gguf(str(first))
    assert e.value.code == "not-found"


def test_a_part_under_the_name_of_another_is_refused(split: Split) -> None:
    error = refused(split(3, swap=True))
    assert error.code == "bad-split"
    assert "expected split.no 1 of split.count 3, found 2 of 3" in error.message


def test_tensors_lacking_in_all_parts_are_missed(split: Split) -> None:
    assert refused(split(3, total=12)).code == "bad-split"


def test_parts_need_not_say_how_many_tensors_there_are(split: Split) -> None:
    with open_gguf(str(split(2, total=None))) as model:
        assert len(model.tensors) == 11


def test_a_tensor_in_two_parts_is_refused(split: Split) -> None:
    error = refused(split(2, total=12, twice=True))
    assert error.code == "duplicate-tensor"
    assert "already in" in error.message


def test_a_part_by_another_name_is_refused_with_the_name_it_needs(split: Split, tmp_path: Path) -> None:
    renamed = tmp_path / "model.gguf"
    split(2).rename(renamed)
    error = refused(renamed)
    assert error.code == "bad-split"
    assert "-NNNNN-of-00002.gguf" in error.message


def test_a_name_like_a_parts_without_split_keys_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "small-00001-of-00002.gguf"
    path.write_bytes(make_ggufs.small())
    with open_gguf(str(path)) as model:
        assert len(model.tensors) == 11


@pytest.mark.parametrize("count", [600, 65_535])
def test_a_count_of_parts_over_the_cap_is_refused(count: int, tmp_path: Path) -> None:
    path = tmp_path / f"small-00001-of-{count:05}.gguf"
    path.write_bytes(part(0, count, [], None))
    assert refused(path).code == "bad-split"


def test_parts_are_closed_where_one_is_broken(split: Split, tmp_path: Path) -> None:
    """An unclosed descriptor would be a leak for as long as a service runs."""
    first = split(3)
    (tmp_path / "small-00003-of-00003.gguf").write_bytes(b"")
    before = set(Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").exists() else set()
    refused(first)
    after = set(Path("/proc/self/fd").iterdir()) if before else set()
    assert len(after) == len(before)
