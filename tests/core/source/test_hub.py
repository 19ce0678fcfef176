"""hf:// leads to the hub's file of that revision, with the token, by range requests."""

from __future__ import annotations

import random

import pytest
from store_doubles import FaultyStore

from knotctl.core.errors import KnotctlError
from knotctl.core.source.opening import open_source

DATA = random.Random(6).randbytes(400_000)


@pytest.fixture
def hub(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", faulty.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return faulty


@pytest.mark.parametrize(
    ("ref", "path"),
    [
        ("hf://org/repo/m.gguf", "/org/repo/resolve/main/m.gguf"),
        ("hf://org/re.po-1/sub/m.gguf", "/org/re.po-1/resolve/main/sub/m.gguf"),
        ("hf://org/repo@v1.0/m.gguf", "/org/repo/resolve/v1.0/m.gguf"),
    ],
)
def test_a_file_is_read_with_the_token_and_by_range(ref: str, path: str, hub: FaultyStore) -> None:
    hub.objects[path] = DATA
    source = open_source(ref)
    assert source.read(300_000, 50_000) == DATA[300_000:350_000]
    assert source.name == ref
    assert all(h["authorization"] == "Bearer hf_secret" and "range" in h for _, h in hub.requests)
    assert "secret" not in source.identity
    source.close()


@pytest.mark.parametrize("ref", ["hf://", "hf://org/repo", "hf://org//m", "hf://org/repo/../../x", "hf://../repo/m"])
def test_what_names_no_file_is_refused(ref: str, hub: FaultyStore) -> None:
    with pytest.raises(KnotctlError) as e:
        open_source(ref)
    assert (e.value.code, e.value.exit_code) == ("bad-ref", 2)
    assert hub.requests == []


def test_offline_is_offline(hub: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(KnotctlError) as e:
        open_source("hf://org/repo/m.gguf")
    assert (e.value.code, e.value.exit_code) == ("offline", 4)
    assert hub.requests == []


def test_a_file_that_is_not_there_is_named(hub: FaultyStore) -> None:
    with pytest.raises(KnotctlError) as e:
        open_source("hf://org/repo/none.gguf")
    assert e.value.code == "not-found"
    assert "hf://org/repo/none.gguf" in e.value.message
