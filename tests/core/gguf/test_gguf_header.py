"""A GGUF's header is read right, or refused by name, within what the file really has."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import make_ggufs
import pytest
from gguf import GGUFReader
from gguf_bytes import ARRAY, F32, STRING, U32, gguf, info, key, lay_out, u64
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import MemorySource

from knotctl.core.errors import GgufError, SourceError
from knotctl.core.gguf import cursor, limits
from knotctl.core.gguf.codes import FORMAT_CODES, MODEL_CODES
from knotctl.core.gguf.header import GgufFile, read_gguf
from knotctl.core.gguf.limits import ValueType

FIXTURES = Path(make_ggufs.__file__).parent
PARSE = [(code, case) for code, cases in make_ggufs.PARSE.items() for case in cases]
# These need a file over a cap, or two files: test_parts.py and below.
ELSEWHERE = {"header-too-large", "bad-split", "tokenizer-too-large"}


def parse(data: bytes) -> GgufFile:
    return read_gguf(MemorySource(data))


def refused(data: bytes) -> GgufError:
    with pytest.raises(GgufError) as e:
        parse(data)
    return e.value


@pytest.mark.parametrize(("code", "case"), PARSE, ids=[f"{code}: {case}" for code, case in PARSE])
def test_what_is_broken_is_refused_by_name_and_place(code: str, case: str) -> None:
    error = refused(make_ggufs.PARSE[code][case])
    assert error.code == code
    assert error.message.startswith("memory.gguf: byte ")


@pytest.mark.parametrize(("code", "case"), PARSE, ids=[f"{code}: {case}" for code, case in PARSE])
def test_nothing_is_allocated_because_a_file_claims_it(code: str, case: str) -> None:
    data = make_ggufs.PARSE[code][case]
    tracemalloc.start()
    refused(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 + 4 * len(data)


@pytest.mark.parametrize("twin", make_ggufs.TWINS)
def test_what_is_almost_broken_is_read(twin: str) -> None:
    parse(make_ggufs.TWINS[twin])


def test_every_code_has_a_case() -> None:
    assert set(make_ggufs.PARSE) == set(FORMAT_CODES) - ELSEWHERE
    assert set(make_ggufs.MODEL) == set(MODEL_CODES) - ELSEWHERE | {"duplicate-tensor"}


def test_every_code_that_is_raised_has_a_meaning() -> None:
    core = Path(cursor.__file__).parent.parent
    files = [*(core / "gguf").glob("*.py"), core / "knot" / "gguf_config.py", core / "knot" / "from_gguf.py"]
    raised = {code for f in files for code in re.findall(r'fail\((?:[\w.]+, )?\s*"([a-z0-9-]+)"', f.read_text())}
    raised |= {"bad-split"}  # the default of parts._fail
    assert raised == set(FORMAT_CODES) | set(MODEL_CODES)


def test_fixtures_are_what_the_script_makes() -> None:
    made = make_ggufs.make()
    assert {p.name: p.read_bytes() for p in (FIXTURES / "ggufs").iterdir()} == made


def test_a_file_cut_anywhere_is_refused() -> None:
    infos, _ = lay_out(make_ggufs.tensors())
    header = len(gguf(make_ggufs.keys().values(), infos, alignment=1))
    whole = make_ggufs.small()
    last = parse(whole).tensors[-1]
    for end in range(last.offset + last.length):
        assert refused(whole[:end]).code == ("truncated" if end < header else "tensor-beyond-file"), end
    parse(whole[: last.offset + last.length])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_bytes_are_changed_only_a_gguf_error_comes_out(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([make_ggufs.small(), make_ggufs.TWINS["an array of each kind"]])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        new = data.draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([u64(n) for n in (0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1)])
        )
        raw[at : at + len(new)] = new
    try:
        file = parse(bytes(raw))
    except GgufError as e:
        assert e.code in FORMAT_CODES
        return
    for t in file.tensors:
        assert 0 <= t.offset <= t.offset + t.length <= file.size


def test_values_of_every_kind_are_the_files(tmp_path: Path) -> None:
    values: list[tuple[int, Any]] = [
        (0, 255), (1, -128), (2, 65_535), (3, -32_768), (4, (1 << 32) - 1), (5, -(1 << 31)), (6, 0.1), (7, True),
        (8, "naïve\n"), (10, (1 << 64) - 1), (11, -(1 << 63)), (12, 0.1),
    ]  # fmt: skip
    keys = [key(f"k{kind}", kind, value) for kind, value in values]
    keys += [key(f"a{kind}", ARRAY, (kind, [value, value])) for kind, value in values]
    metadata = parse(gguf(keys)).metadata
    for kind, value in values:
        expected = struct.unpack("<f", struct.pack("<f", value))[0] if kind == F32 else value
        single, several = metadata[f"k{kind}"], metadata[f"a{kind}"]
        assert (single.type, single.value, type(single.value)) == (ValueType(kind), expected, type(value))
        assert (several.type, several.item, list(several.value)) == (ValueType.ARRAY, ValueType(kind), [expected] * 2)


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "tiny-qwen3"])
def test_tensors_lie_where_the_reference_reader_finds_them(name: str) -> None:
    path = FIXTURES / f"{name}.gguf"
    ours, theirs = parse(path.read_bytes()), GGUFReader(path)
    assert [(t.name, t.qtype.name, t.shape, t.offset, t.length) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for k, found in ours.metadata.items():
        value = found.value if isinstance(found.value, int | float | str) else list(found.value)
        assert value == fields[k].contents()


def test_a_header_costs_few_reads_and_each_byte_is_read_once() -> None:
    words = [f"token {i}" for i in range(100_000)]
    source = MemorySource(gguf([key("tokens", ARRAY, (STRING, words))]))
    assert read_gguf(source).metadata["tokens"].value == words
    assert len(source.reads) <= 5
    ends = [offset + length for offset, length in source.reads]
    assert [offset for offset, _ in source.reads] == [0, *ends[:-1]]


def test_a_header_over_the_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_ggufs.small()
    header = parse(whole).data_offset
    monkeypatch.setattr(cursor, "HEADER_CAP", header)
    parse(whole)
    monkeypatch.setattr(cursor, "HEADER_CAP", header // 2)
    assert refused(whole).code == "header-too-large"


def test_strings_are_capped_over_all_arrays_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrays(*counts: int) -> bytes:
        return gguf([key(f"k{i}", ARRAY, (STRING, ["x"] * n)) for i, n in enumerate(counts)])

    monkeypatch.setattr(limits, "STRINGS_CAP", 5)
    parse(arrays(2, 3))
    assert refused(arrays(3, 3)).code == "count-too-large"


def test_arrays_nested_as_deep_as_the_cap_allows_do_not_recurse() -> None:
    assert refused(gguf([make_ggufs.nested(1_000_000)])).code == "nested-array"


def test_a_name_with_an_escape_sequence_is_shown_escaped() -> None:
    message = refused(make_ggufs.PARSE["bad-tensor-name"]["ANSI escape"]).message
    assert "\\x1b[31mred" in message
    assert message.isprintable()


def test_the_files_name_is_shown_escaped() -> None:
    with pytest.raises(GgufError) as e:
        read_gguf(MemorySource(b"", name="\x1b[31m.gguf"))
    assert e.value.message.startswith("\\x1b[31m.gguf: ")


def test_supported_types_are_listed_where_one_is_unknown() -> None:
    assert "Q4_K" in (refused(make_ggufs.PARSE["unknown-type"]["42"]).hint or "")


def test_bytes_that_cannot_be_had_are_no_fault_of_the_file() -> None:
    class Broken(MemorySource):
        def read(self, offset: int, length: int) -> bytes:
            raise SourceError("read-failed", "disk on fire")

    with pytest.raises(SourceError):
        read_gguf(Broken(make_ggufs.small()))


def test_many_tensors_take_linear_time() -> None:
    """Quadratic work over 60,000 tensors would not end within the suite."""
    infos = [info(f"t{i}", [0], 0, 0) for i in range(60_000)]
    assert len(parse(gguf([key("a", U32, 1)], infos)).tensors) == 60_000
