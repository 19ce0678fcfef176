"""API keys: where they come from, which are none, and what may listen without."""

from __future__ import annotations

from pathlib import Path

import pytest

from knotctl.core.errors import KnotctlError
from knotctl.services.keys import ApiKeys, check_exposure, is_loopback, load_keys


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# a comment\n\n  first-key-1  \nsecond-key-2\n")
    keys = load_keys(path, {"KNOTCTL_API_KEY": "third-key-3"})
    assert all(keys.accept({"x-api-key": k}) for k in ("first-key-1", "second-key-2", "third-key-3"))
    assert not any(keys.accept({"x-api-key": k}) for k in ("", "# a comment", "first-key-12", "  first-key-1"))
    assert not keys.accept({})
    assert not load_keys(None, {})


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "bad-api-key"), (b"# none\n", "bad-api-key"), (b"short\n", "bad-api-key"), (b"two words\n", "bad-api-key"),
     ("schlüssel-1".encode(), "bad-api-key"), (b"\xff\xff\xff\xff\xff\xff\xff\xff", "read-failed")],
)  # fmt: skip
def test_a_file_without_sound_keys_is_refused(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(KnotctlError) as e:
        load_keys(path, {})
    assert e.value.code == code


def test_a_key_is_not_in_what_a_log_would_show() -> None:
    keys = ApiKeys(["secret-key-1"])
    assert "secret" not in repr(keys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "a.localhost"])
def test_loopback_may_be_open(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, ApiKeys([]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.1", "example.com", "127.0.0.1.example.com", "*"])
def test_all_else_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(KnotctlError, match="needs an API key"):
        check_exposure(host, ApiKeys([]))
    check_exposure(host, ApiKeys(["secret-key-1"]))
