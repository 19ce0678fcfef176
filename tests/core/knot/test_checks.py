"""Every finding code has a knot that is broken in this way and no other, and a twin in which nothing is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from knotctl.core.errors import KnotError
from knotctl.core.findings import Severity
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.header import parse_header
from knotctl.core.knot.verify import Verification

KNOTS = Path(__file__).parents[3] / "fixtures" / "knots"
# Found in the payload's bytes, or not in this file at all.
DATA_CODES = {code for code, c in CODES.items() if c.told_by == "data"}
OTHER_FILE = {code for code, c in CODES.items() if c.told_by == "source"} | {"unreadable"}
# Asked by verify and by whoever runs the model: a reader of one tensor needs no whole model.
VERIFY_ONLY = {"missing-tensor"}
HEADER_CODES = [c for c in CODES if c not in DATA_CODES | OTHER_FILE]

Verify = Callable[..., Verification]


def test_fixtures_are_what_the_script_makes(make_knots: ModuleType) -> None:
    made = {f"{code}.knot": make() for code, make in make_knots.BROKEN.items()}
    made["small.knot"] = make_knots.small().build()
    assert {p.name: p.read_bytes() for p in KNOTS.glob("*.knot")} == made


def test_every_code_has_a_fixture(make_knots: ModuleType) -> None:
    assert set(make_knots.BROKEN) == set(CODES) - OTHER_FILE


@pytest.mark.parametrize("code", HEADER_CODES)
def test_the_broken_knot_is_found_broken_in_this_way_only(code: str, verified: Verify) -> None:
    result = verified((KNOTS / f"{code}.knot").read_bytes())
    assert {f.code for f in result.findings} == {code}
    assert result.ok is (CODES[code].severity is not Severity.ERROR)
    for f in result.findings:
        assert f.severity is CODES[code].severity
        assert f.offset is not None
        assert (f.repair is not None) == bool(CODES[code].mend)


@pytest.mark.parametrize("code", sorted(DATA_CODES))
def test_what_is_wrong_with_the_payload_is_found_by_reading_it_only(code: str, verified: Verify) -> None:
    data = (KNOTS / f"{code}.knot").read_bytes()
    assert verified(data).findings == ()
    result = verified(data, read_data=True)
    assert [f.code for f in result.findings] == [code]
    assert result.ok is (CODES[code].severity is not Severity.ERROR)
    (found,) = result.findings
    assert found.tensor == ("knot_tokenizer" if code.startswith("bad-t") else "blk_0_ffn_up_weight")
    assert found.offset is not None


@pytest.mark.parametrize("code", list(CODES))
def test_nothing_is_found_in_its_twin(code: str, make_knots: ModuleType, verified: Verify) -> None:
    result = verified(make_knots.TWINS.get(code, lambda: make_knots.small().build())(), read_data=True)
    assert result.findings == ()
    assert result.ok
    assert result.data_bytes == result.payload_bytes


def test_a_broken_header_keeps_the_payload_unread(verified: Verify) -> None:
    result = verified((KNOTS / "stale-layout.knot").read_bytes(), read_data=True)
    assert [f.code for f in result.findings] == ["stale-layout"]
    assert result.data_bytes is None


@pytest.mark.parametrize("code", [c for c in HEADER_CODES if CODES[c].severity is Severity.ERROR])
def test_readers_refuse_what_verify_calls_an_error_with_the_same_code(code: str) -> None:
    data = (KNOTS / f"{code}.knot").read_bytes()
    if code in VERIFY_ONLY:
        parse_header(data, len(data))
        return
    with pytest.raises(KnotError) as e:
        parse_header(data, len(data), "x.knot")
    assert e.value.code == code
    assert e.value.message.startswith("x.knot: byte ")


@pytest.mark.parametrize("code", [c for c in HEADER_CODES if CODES[c].severity is not Severity.ERROR])
def test_readers_accept_what_verify_warns_of(code: str) -> None:
    data = (KNOTS / f"{code}.knot").read_bytes()
    parse_header(data, len(data))


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"[]",
        b"null",
        b'"KNOT"',
        b"{} {}",
        b"{} x",
        b" {}",
        b"\xef\xbb\xbf{}",
        b'{"a":\xff}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e400}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":18446744073709551616}',
        b'{"a":"\\ud800"}',
        b'{"\\udfff":1}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":01}',
    ],
    ids=lambda m: repr(m[:20]),
)
def test_json_that_is_not_strict_is_refused(meta: bytes, make_knots: ModuleType) -> None:
    data = make_knots.frame_raw(meta, b"")
    with pytest.raises(KnotError) as e:
        parse_header(data, len(data))
    assert e.value.code == ("bad-meta-length" if len(meta) < 2 else "bad-json")


@pytest.mark.parametrize("meta", [b'{"a":1,"a":2}', b'{"a":{"b":1,"\\u0062":1}}', b'{"a":[{"x":1,"x":1}]}'])
def test_duplicate_keys_are_refused_at_any_depth(meta: bytes, make_knots: ModuleType) -> None:
    data = make_knots.frame_raw(meta, b"")
    with pytest.raises(KnotError) as e:
        parse_header(data, len(data))
    assert e.value.code == "duplicate-key"


def test_all_findings_are_collected(make_knots: ModuleType, verified: Verify) -> None:
    draft = make_knots.small()
    draft.edit(make_knots.tensor("blk_0_ffn_up_weight", type="Q9_9", shape="x", offset=-1, sha256="z"))
    draft.edit(make_knots.tensor("blk_0_ffn_down_weight", length=True))
    draft.edit(lambda d: d.pop("encoder")).edit(lambda d: d["config"].update(rmsEps=-1, tiedEmbedding=0))
    result = verified(draft.build())
    assert [(f.code, f.tensor) for f in result.findings] == [
        ("bad-field", None),
        ("unknown-type", "blk_0_ffn_up_weight"),
        ("bad-shape", "blk_0_ffn_up_weight"),
        ("bad-offset", "blk_0_ffn_up_weight"),
        ("bad-digest", "blk_0_ffn_up_weight"),
        ("bad-length", "blk_0_ffn_down_weight"),
        ("bad-config", None),
        ("bad-config", None),
    ]


@pytest.mark.parametrize("value", [-1, 0.0, 1.5, "0", True, None, [0], 1 << 63])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_an_offset_or_length_is_an_integer_or_refused(
    field: str, value: object, make_knots: ModuleType, verified: Verify
) -> None:
    result = verified(make_knots.small().edit(make_knots.tensor("blk_0_ffn_up_weight", **{field: value})).build())
    assert [f.code for f in result.findings] == [f"bad-{field}"]


@pytest.mark.parametrize("value", [None, "32", [32.0, 32], [-32, -32], [True, 1024], {}, [[32], 32]])
def test_a_shape_is_a_list_of_sizes_or_refused(value: object, make_knots: ModuleType, verified: Verify) -> None:
    result = verified(make_knots.small().edit(make_knots.tensor("blk_0_ffn_up_weight", shape=value)).build())
    assert [f.code for f in result.findings] == ["bad-shape"]


@pytest.mark.parametrize("value", [None, "", "q4_0", "F32 ", 2, ["Q4_0"], "Q4_0\0"])
def test_a_type_that_is_not_known_is_never_taken_for_another(
    value: object, make_knots: ModuleType, verified: Verify
) -> None:
    result = verified(make_knots.small().edit(make_knots.tensor("blk_0_ffn_up_weight", type=value)).build())
    assert [f.code for f in result.findings] == ["unknown-type"]


def test_f32_declared_on_quantised_bytes_is_betrayed_by_the_length(make_knots: ModuleType, verified: Verify) -> None:
    result = verified(make_knots.small().edit(make_knots.tensor("blk_0_ffn_up_weight", type="F32")).build())
    assert [f.code for f in result.findings] == ["bad-length"]


@pytest.mark.parametrize("value", ["", " ", "a b", "a\x1b[31m", "../\n", "é", "x" * 129, 5, None])
def test_a_name_is_printable_or_refused_and_shown_escaped(
    value: object, make_knots: ModuleType, verified: Verify
) -> None:
    item = {"name": value, "shape": [0], "offset": 0, "length": 0}
    result = verified(make_knots.small().edit(make_knots.extra(**item)).build())
    assert [f.code for f in result.findings] == ["bad-name"]
    assert f"{result.findings[0].message}{result.findings[0].tensor}".isprintable()


def test_a_header_of_a_million_lies_stays_readable(make_knots: ModuleType, verified: Verify) -> None:
    result = verified(make_knots.small().edit(lambda d: d["tensors"].extend([0] * 1000)).build())
    assert len(result.findings) == 100
    assert result.unlisted == 900


def test_a_claim_of_2_to_the_63_layers_costs_nothing(make_knots: ModuleType, verified: Verify) -> None:
    result = verified(make_knots.small().edit(lambda d: d["config"].update(numLayers=2**63 - 1)).build())
    assert {f.code for f in result.findings} == {"missing-tensor"}
    assert result.findings[0].tensor == "blk_1_attn_norm_weight"
