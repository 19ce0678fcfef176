"""Any flipped bit of the payload is found, its tensor and chunk named; sound bytes are accused of nothing."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from types import ModuleType

import pytest

from knotctl.core.errors import ObjectChanged, SourceError
from knotctl.core.knot import data as data_module
from knotctl.core.knot.data import check_data
from knotctl.core.knot.header import parse_header
from knotctl.core.knot.layout import DIGEST_BYTES, DIGEST_CHUNK
from knotctl.core.knot.subset import Subset
from knotctl.core.knot.text import verify_tokenizer
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.file import FileSource


def large(make_knots: ModuleType):  # type: ignore[no-untyped-def]
    """The small knot with a table of five chunks; tensors begin within chunks."""
    draft, rng = make_knots.small(), random.Random(3)
    rows = 5 * DIGEST_CHUNK // 18
    block = [struct.pack("<e", rng.uniform(-1, 1)) + rng.randbytes(16) for _ in range(rows)]
    draft.tensors[0] = ("token_embd_weight", "Q4_0", [rows, 32], b"".join(block))
    draft.config["embeddingRows"] = rows
    return draft


class Memory:
    """A source over bytes."""

    def __init__(self, data: bytes) -> None:
        self.name, self.data, self.size, self.identity = "memory", data, len(data), "1"

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def read_into(self, offset: int, out: memoryview) -> None:
        out[:] = self.read(offset, len(out))

    def close(self) -> None: ...


def check(data: bytes, header_of: bytes | None = None, **options: object):  # type: ignore[no-untyped-def]
    header = parse_header(header_of or data, len(data))
    return header, check_data(Memory(data), header, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("jobs", [1, 3])
def test_sound_bytes_are_all_checked_and_accused_of_nothing(jobs: int, make_knots: ModuleType) -> None:
    told: list[int] = []
    header, result = check(large(make_knots).build(), jobs=jobs, advance=told.append)
    assert result.findings == ()
    assert result.checked == sum(told) == sum(e.length for e in header.tensors)


def test_every_byte_is_read_once(make_knots: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(large(make_knots).build())
    source = CountedSource(FileSource(tmp_path / "x"))
    header = parse_header((tmp_path / "x").read_bytes(), source.size)
    check_data(source, header)
    table = header.tensors[-1].length
    assert source.bytes == source.size - header.payload_offset + table  # the table is read before, to compare with
    source.close()


def test_a_flipped_bit_anywhere_names_its_tensor_and_chunk(make_knots: ModuleType) -> None:
    data = large(make_knots).build()
    header = parse_header(data, len(data))
    table = header.tensors[-1]
    rng = random.Random(5)
    edges = [header.payload_offset + at for e in header.tensors for at in (e.offset, e.end - 1)]
    for at in edges + [rng.randrange(header.payload_offset, len(data)) for _ in range(50)]:
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        _, result = check(bytes(changed), data)
        place = at - header.payload_offset
        hit = next(e for e in header.tensors if e.offset <= place < e.end)
        found = [f for f in result.findings if f.code == "digest-mismatch"]
        assert [f.tensor for f in found] == [hit.name]
        assert hit is table or f"in chunk {place // DIGEST_CHUNK}" in found[0].message
        assert found[0].offset is not None
        assert found[0].offset <= at < found[0].offset + max(DIGEST_CHUNK, table.length)


def test_a_flip_is_found_by_the_table_alone_where_a_tensor_has_no_sha256(make_knots: ModuleType) -> None:
    draft = large(make_knots).edit(make_knots.tensor("blk_0_ffn_up_weight", sha256=None))
    data = draft.build()
    header = parse_header(data, len(data))
    entry = next(e for e in header.tensors if e.name == "blk_0_ffn_up_weight")
    changed = bytearray(data)
    changed[header.range_of(entry).start + 7] ^= 4
    _, result = check(bytes(changed), data)
    assert [(f.code, f.tensor) for f in result.findings] == [("digest-mismatch", "blk_0_ffn_up_weight")]


def test_without_a_table_the_tensor_is_named_all_the_same(make_knots: ModuleType) -> None:
    draft = large(make_knots)
    draft.table = False
    data = draft.build()
    changed = data[:-300] + bytes([data[-300] ^ 1]) + data[-299:]
    _, result = check(changed, data)
    assert [(f.code, f.tensor) for f in result.findings] == [("digest-mismatch", "output_norm_weight")]


def test_a_table_that_was_wrong_from_the_start_is_accused_and_not_its_tensors(make_knots: ModuleType) -> None:
    draft = large(make_knots)
    good = draft.parts()[1][-DIGEST_BYTES * 6 :]
    draft.table = False
    wrong = good[:8] + b"12345678" + good[16:]
    draft.tensors.append(("knot_digests", "I8", [len(wrong)], wrong))
    _, result = check(draft.build())
    assert [(f.code, f.tensor) for f in result.findings] == [("digest-mismatch", "knot_digests")]
    assert "chunk 1" in result.findings[0].message


@pytest.mark.parametrize("subset", ["1/1", "100%", "1GiB"])
def test_a_subset_that_is_the_whole_finds_every_flip(
    subset: str, make_knots: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "PIECE", DIGEST_CHUNK)
    data = large(make_knots).build()
    header = parse_header(data, len(data))
    _, result = check(data, subset=Subset.parse(subset))
    assert result.findings == ()
    assert result.checked == header.tensors[-1].offset
    for e in header.tensors:
        changed = bytearray(data)
        changed[header.range_of(e).end - 1] ^= 1
        _, result = check(bytes(changed), data, subset=Subset.parse(subset))
        assert [f.tensor for f in result.findings if f.code == "digest-mismatch"] == [e.name]


def test_slices_together_are_the_whole_and_read_no_more(
    make_knots: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data_module, "PIECE", DIGEST_CHUNK)
    (tmp_path / "x").write_bytes(large(make_knots).build())
    header = parse_header((tmp_path / "x").read_bytes(), (tmp_path / "x").stat().st_size)
    checked = read = 0
    for i in (1, 2, 3):
        source = CountedSource(FileSource(tmp_path / "x"))
        checked += check_data(source, header, subset=Subset.parse(f"{i}/3")).checked
        read += source.bytes
        source.close()
    assert checked == header.tensors[-1].offset
    assert read == checked + 3 * 2 * header.tensors[-1].length


def test_without_a_table_a_subset_is_of_whole_tensors(make_knots: ModuleType) -> None:
    draft = large(make_knots)
    draft.table = False
    data = draft.build()
    results = [check(data, subset=Subset.parse(f"{i}/2"))[1] for i in (1, 2)]
    assert all(not r.findings for r in results)
    assert sum(r.checked for r in results) == sum(len(t[3]) for t in draft.tensors)


def test_blocks_across_pieces_are_looked_at(make_knots: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "PIECE", DIGEST_CHUNK)
    draft = large(make_knots)
    table = draft.data("token_embd_weight")
    crossing = DIGEST_CHUNK // 18
    assert crossing * 18 < DIGEST_CHUNK < (crossing + 1) * 18
    for block in (crossing - 1, crossing, crossing + 1, len(table) // 18 - 1):
        bad = table[: block * 18] + struct.pack("<e", float("inf")) + table[block * 18 + 2 :]
        header, result = check(large(make_knots).replace("token_embd_weight", bad).build())
        (found,) = result.findings
        assert found.code == "non-finite-scale"
        assert f"block {block} of" in found.message
        assert found.offset == header.payload_offset + block * 18


def test_a_read_that_fails_is_an_error_and_stops_the_others(make_knots: ModuleType) -> None:
    data = large(make_knots).build()

    class Failing(Memory):
        def read_into(self, offset: int, out: memoryview) -> None:
            raise SourceError("read-failed", "memory: gone")

    with pytest.raises(SourceError) as e:
        check_data(Failing(data), parse_header(data, len(data)))
    assert e.value.code == "read-failed"


def test_a_file_that_is_changed_meanwhile_is_an_error(make_knots: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = large(make_knots).build()
    path.write_bytes(data)
    source = FileSource(path)

    def change(_: int) -> None:
        with path.open("r+b") as f:
            f.seek(len(data) - 1)
            f.write(b"!")
            f.truncate(len(data) - 1)

    with pytest.raises(ObjectChanged):
        check_data(source, parse_header(data, len(data)), jobs=1, advance=change)
    source.close()


def test_a_tokenizer_of_more_tokens_than_rows_does_not_fit(make_knots: ModuleType) -> None:
    draft = make_knots.small()
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list("abcdefghi"), "tokenizer.ggml.merges": []}
    packed = make_knots.store_zstd(make_knots.dump(keys, sealed=False))
    data = draft.replace("knot_tokenizer", packed).build()
    found = list(verify_tokenizer(Memory(data), parse_header(data, len(data))))
    assert [f.code for f in found] == ["bad-tokenizer"]
    assert "at most 8 tokens" in found[0].message


def test_a_tokenizer_that_we_cannot_run_is_no_defect(make_knots: ModuleType) -> None:
    packed = make_knots.store_zstd(b'{"tokenizer.ggml.model":"wordpiece","tokenizer.ggml.tokens":["a"]}')
    data = make_knots.small().replace("knot_tokenizer", packed).build()
    assert not list(verify_tokenizer(Memory(data), parse_header(data, len(data))))


def test_a_damaged_table_does_not_accuse_a_tensor_that_only_it_speaks_of(make_knots: ModuleType) -> None:
    draft = large(make_knots).edit(make_knots.tensor("blk_0_ffn_up_weight", sha256=None))
    data = bytearray(draft.build())
    data[-1] ^= 1
    _, result = check(bytes(data), draft.build())
    assert [(f.code, f.tensor) for f in result.findings] == [("digest-mismatch", "knot_digests")]
