"""An object appears whole or not at all, and replaces none that it must not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from store_doubles import BUCKET

from knotctl.cli import main
from knotctl.core.errors import SourceError, UsageError
from knotctl.core.source import upload
from knotctl.core.source.opening import open_source
from knotctl.core.source.s3 import s3_client
from knotctl.core.source.upload import check_object, upload_file

DATA = random.Random(9).randbytes(12 << 20)
FIXTURES = Path(__file__).parents[3] / "fixtures"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(DATA)
    return tmp_path / "f"


@pytest.fixture(params=[5 << 20, 16 << 20], ids=["parts", "whole"])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(upload, "_PART", request.param)
    return int(request.param)


def test_what_was_sent_is_there(s3: Callable[[str, bytes], str], part: int, file: Path) -> None:
    ref = s3(f"other-{part}", b"x").rpartition("/")[0] + f"/new-{part}"
    told: list[int] = []
    upload_file(file, ref, advance=told.append)
    assert sum(told) == len(DATA)
    source = open_source(ref)
    assert source.read(0, source.size) == DATA
    source.close()


def test_an_object_is_replaced_by_force_only(s3: Callable[[str, bytes], str], part: int, file: Path) -> None:
    ref = s3(f"there-{part}", b"mine")
    with pytest.raises(UsageError) as e:
        check_object(ref, force=False)
    assert (e.value.code, e.value.exit_code) == ("exists", 2)
    check_object(ref, force=True)
    check_object(ref + "-not", force=False)
    upload_file(file, ref, force=True)
    source = open_source(ref)
    assert source.size == len(DATA)
    source.close()


def test_an_object_that_comes_to_exist_meanwhile_is_kept(
    moto_url: str, part: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_doubles import point_s3_at, put_s3

    point_s3_at(monkeypatch, moto_url)
    ref = put_s3(f"race-{part}", b"theirs")
    with pytest.raises(UsageError) as e:
        upload_file(file, ref)
    assert e.value.code == "exists"
    source = open_source(ref)
    assert source.read(0, 6) == b"theirs"
    source.close()
    assert pending() == []


def pending() -> list[object]:
    client = s3_client()
    found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    client.close()
    return found  # type: ignore[no-any-return]


def test_a_failed_upload_leaves_neither_object_nor_parts(
    moto_url: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_doubles import point_s3_at, put_s3

    point_s3_at(monkeypatch, moto_url)
    put_s3("any", b"")
    monkeypatch.setattr(upload, "_PART", 5 << 20)
    real = upload._Upload.part

    def failing(self: upload._Upload, upload_id: str, at: int, size: int) -> dict[str, object]:
        if at == size:
            raise SourceError("read-failed", "the disk broke")
        return real(self, upload_id, at, size)

    monkeypatch.setattr(upload._Upload, "part", failing)
    with pytest.raises(SourceError):
        upload_file(file, f"s3://{BUCKET}/half")
    with pytest.raises(SourceError) as e:
        open_source(f"s3://{BUCKET}/half")
    assert e.value.code == "not-found"
    assert pending() == []


def test_a_knot_is_encoded_into_a_store(
    s3: Callable[[str, bytes], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = s3("models/any", b"").rpartition("/")[0] + "/tiny.knot"
    gguf = str(FIXTURES / "tiny-llama.gguf")
    assert main(["encode", gguf, str(tmp_path / "x.knot")]) == 0
    assert main(["encode", gguf, ref]) == 0
    source = open_source(ref)
    assert source.read(0, source.size) == (tmp_path / "x.knot").read_bytes()
    source.close()
    assert main(["encode", gguf, ref]) == 2
    assert main(["encode", gguf, ref, "--force"]) == 0
    assert main(["verify", "--read-data", ref]) == 0
    capsys.readouterr()
