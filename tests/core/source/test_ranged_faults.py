"""A store that fails for a moment is asked again; one that answers with other bytes than were asked for is an error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from store_doubles import FaultyStore

from knotctl.core.errors import ObjectChanged, SourceError, UsageError
from knotctl.core.source import http, retry, s3
from knotctl.core.source.base import ByteSource
from knotctl.core.source.opening import open_source
from knotctl.core.source.ranged import HEAD_BYTES

DATA = random.Random(2).randbytes(3 * HEAD_BYTES)
AT, LENGTH = HEAD_BYTES + 17, 100_000
WANTED = DATA[AT : AT + LENGTH]

Open = Callable[[], ByteSource]


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which nobody waits for."""
    waits: list[float] = []
    monkeypatch.setattr(retry, "_sleep", waits.append)
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.3)
    return waits


@pytest.fixture(params=["http", "s3"])
def open_it(request: pytest.FixtureRequest, faulty: FaultyStore) -> Open:
    url = faulty.put("m.knot", DATA)
    return lambda: open_source(url if request.param == "http" else "s3://models/m.knot")


def test_one_request_opens_and_holds_the_head(open_it: Open, faulty: FaultyStore) -> None:
    source = open_it()
    assert source.read(0, HEAD_BYTES) == DATA[:HEAD_BYTES]
    assert source.size == len(DATA)
    assert [h["range"] for _, h in faulty.requests] == [f"bytes=0-{HEAD_BYTES - 1}"]
    source.close()


def test_later_requests_are_pinned_and_of_exactly_the_range(open_it: Open, faulty: FaultyStore) -> None:
    source = open_it()
    assert source.read(HEAD_BYTES - 10, 30) == DATA[HEAD_BYTES - 10 : HEAD_BYTES + 20]
    _, headers = faulty.requests[-1]
    assert headers["range"] == f"bytes={HEAD_BYTES}-{HEAD_BYTES + 19}"
    assert headers["if-match"].strip('"') in source.identity
    source.close()


@pytest.mark.parametrize("fault", ["500", "502", "503", "504", "429", "reset", "short", "hang", "wrong-range", "long"])
@pytest.mark.parametrize("when", ["open", "read"])
def test_what_passes_is_tried_again(
    fault: str, when: str, open_it: Open, faulty: FaultyStore, slept: list[float]
) -> None:
    if when == "open":
        faulty.faults = [fault]
    source = open_it()
    if when == "read":
        faulty.faults = [fault]
    assert source.read(AT, LENGTH) == WANTED
    assert len(faulty.requests) == 3
    assert len(slept) == 1
    source.close()


@pytest.mark.parametrize(
    ("fault", "code"), [("503", "store-busy"), ("short", "short-body"), ("wrong-range", "bad-answer")]
)
def test_what_does_not_pass_is_an_error_after_some_attempts(
    fault: str, code: str, open_it: Open, faulty: FaultyStore, slept: list[float]
) -> None:
    source = open_it()
    faulty.faults = [fault] * 50
    with pytest.raises(SourceError) as e:
        source.read(AT, LENGTH)
    # A body that ends early is a broken connection to some clients.
    assert e.value.code in (code, "unreachable")
    assert f"tried {retry.ATTEMPTS} times" in e.value.message
    assert len(faulty.requests) == 1 + retry.ATTEMPTS
    assert slept == sorted(slept)
    source.close()


def test_nobody_waits_beyond_the_deadline(open_it: Open, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_it()
    monkeypatch.setattr(retry, "DEADLINE_S", 0.0)
    faulty.faults = ["503"] * 50
    with pytest.raises(SourceError) as e:
        source.read(AT, LENGTH)
    assert "tried once" in e.value.message
    source.close()


@pytest.mark.parametrize(
    ("status", "code"), [("404", "not-found"), ("403", "permission-denied"), ("400", "read-failed")]
)
@pytest.mark.parametrize("when", ["open", "read"])
def test_what_will_not_pass_is_an_error_at_once(
    status: str, code: str, when: str, open_it: Open, faulty: FaultyStore, slept: list[float]
) -> None:
    if when == "open":
        faulty.faults = [status]
        with pytest.raises(SourceError) as e:
            open_it()
    else:
        source = open_it()
        faulty.faults = [status]
        with pytest.raises(SourceError) as e:
            source.read(AT, LENGTH)
        source.close()
    assert e.value.code == code
    assert "m.knot" in e.value.message
    assert slept == []


@pytest.mark.parametrize("fault", ["", "ignore-if-match", "wrong-etag", "wrong-total"])
def test_an_object_that_is_replaced_is_an_error_and_never_mixed(
    fault: str, open_it: Open, faulty: FaultyStore, slept: list[float]
) -> None:
    source = open_it()
    if fault in ("", "ignore-if-match"):
        faulty.put("m.knot", DATA[::-1])
    faulty.faults = [fault]
    out = bytearray(LENGTH)
    with pytest.raises(ObjectChanged) as e:
        source.read_into(AT, memoryview(out))
    assert (e.value.code, e.value.exit_code) == ("object-changed", 4)
    assert out == bytes(LENGTH)
    assert slept == []
    source.close()
    again = open_it()
    assert (again.identity == source.identity) == (fault in ("wrong-etag", "wrong-total"))
    again.close()


@pytest.mark.parametrize("when", ["open", "read"])
def test_a_server_that_ignores_ranges_is_cut_off(when: str, open_it: Open, faulty: FaultyStore) -> None:
    big = random.Random(4).randbytes(40 << 20)
    faulty.put("m.knot", big)
    if when == "read":
        source = open_it()
    faulty.faults = ["ignore-range"]
    before = time.monotonic()
    with pytest.raises(SourceError) as e:
        open_it() if when == "open" else source.read(AT, LENGTH)
    assert e.value.code == "range-ignored"
    assert time.monotonic() - before < 5
    assert faulty.sent < 1 << 20


def test_a_small_object_that_comes_whole_is_taken(open_it: Open, faulty: FaultyStore) -> None:
    faulty.put("m.knot", b"small")
    faulty.faults = ["ignore-range"]
    source = open_it()
    assert source.read(0, 5) == b"small"
    source.close()


def test_an_empty_object_has_no_bytes(open_it: Open, faulty: FaultyStore) -> None:
    faulty.put("m.knot", b"")
    source = open_it()
    assert (source.size, source.read(0, 0)) == (0, b"")
    source.close()


def test_a_weak_etag_is_no_pin_but_the_time_of_change_is(open_it: Open, faulty: FaultyStore) -> None:
    faulty.faults = ["weak-etag", "weak-etag"]
    source = open_it()
    assert "2026" in source.identity
    assert source.read(AT, LENGTH) == WANTED
    assert "if-match" not in faulty.requests[-1][1]
    source.close()


def test_without_a_validator_no_two_openings_are_the_same(open_it: Open, faulty: FaultyStore) -> None:
    faulty.validators = False
    first, second = open_it(), open_it()
    assert first.read(AT, LENGTH) == WANTED
    assert first.identity != second.identity
    first.close()
    second.close()


def test_a_redirect_is_followed(faulty: FaultyStore) -> None:
    url = faulty.put("m.knot", DATA)
    faulty.faults = ["redirect"]
    source = open_source(url)
    assert source.read(0, 10) == DATA[:10]
    source.close()


def test_secrets_of_a_url_are_not_shown(faulty: FaultyStore) -> None:
    url = faulty.put("m.knot", DATA).replace("http://", "http://me:pass@") + "?X-Signature=secret"
    source = open_source(url)
    for text in (source.name, source.identity):
        assert "pass" not in text
        assert "secret" not in text
    assert source.name.endswith("/models/m.knot")
    source.close()
    faulty.faults = ["403"]
    with pytest.raises(SourceError) as e:
        open_source(url)
    assert "secret" not in e.value.message


def test_no_server_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError) as e:
        open_source("http://127.0.0.1:1/x")
    assert e.value.code == "unreachable"


@pytest.mark.parametrize("ref", ["s3://", "s3://bucket", "s3://bucket/", "s3:///key"])
def test_a_reference_without_bucket_or_key_is_refused(ref: str) -> None:
    with pytest.raises(UsageError):
        open_source(ref)


def test_stores_of_others_tell_a_replaced_object(s3: Callable[[str, bytes], str]) -> None:
    source = open_source(s3("swap.knot", DATA))
    assert source.read(AT, LENGTH) == WANTED
    s3("swap.knot", DATA[::-1])
    with pytest.raises(ObjectChanged):
        source.read(AT, LENGTH)
    source.close()
    with pytest.raises(SourceError) as e:
        open_source("s3://models/no-such-key")
    assert e.value.code == "not-found"
