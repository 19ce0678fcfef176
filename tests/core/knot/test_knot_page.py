"""man/knot.5 says what the code does: numbers against layout.py, codes against CODES, config against KnotConfig."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from knotctl.core import strict_json
from knotctl.core.knot import layout
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.config import JSON_NAMES
from knotctl.core.qtypes import COMPUTABLE

PAGE = (Path(__file__).parents[3] / "man" / "knot.5").read_text().replace("\\-", "-")


def section(name: str) -> str:
    return re.split(rf"^\.SH {name}$", PAGE, flags=re.M)[1].split("\n.SH ")[0]


def table(text: str) -> list[list[str]]:
    return [line.split("\t") for line in re.findall(r"^\.TS\n.*?\n(.*?)^\.TE", text, re.M | re.S)[0].splitlines()]


def test_the_prefix_lies_where_the_page_says() -> None:
    rows = table(section("LAYOUT"))
    fields = [(int(offset), int(size)) for offset, size, _ in rows[1:4]]
    sizes = [struct.calcsize(f"<{code}") for code in re.findall(r"\d*[sHI]", layout.PREFIX.format)]
    assert fields == [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    assert rows[4][0] == str(layout.JSON_OFFSET)
    assert f"the letters {layout.MAGIC.decode()}" in rows[1][2]
    assert rows[2][2] == f"u16 version, {layout.VERSION}"
    assert f"0x{layout.MARKER:02x}" in rows[6][2]
    assert f"multiple of {layout.ALIGNMENT}" in rows[5][2]


def test_the_formula_is_the_codes() -> None:
    formula = re.search(r"is (\(10 .*\) & ~3)", section("LAYOUT"))
    assert formula
    for meta_len in range(2, 40):
        align = eval(formula[1], {"metaLen": meta_len})  # noqa: S307 -- the page's own words
        assert (align, align + 1) == (layout.align(meta_len), layout.payload_offset(meta_len))


def test_caps_and_sizes() -> None:
    assert f"metaLen is 2 to {layout.META_CAP}." in section("LAYOUT")
    assert f"nested at most {strict_json.MAX_DEPTH}" in section("METADATA").replace("\n", " ")
    tensors = section("TENSORS").replace("\n", " ")
    assert f"1 to {layout.NAME_CAP} printable ASCII" in tensors
    assert f"Up to {layout.MAX_DIMS} sizes" in tensors
    assert f"(at most {layout.TOKENIZER_CAP} bytes)" in tensors
    assert f"every {layout.DIGEST_CHUNK} bytes of the payload" in tensors
    assert f"the first {layout.DIGEST_BYTES} bytes of SHA-256" in tensors
    assert layout.INT_CAP == 2**63 - 1
    assert f"first {layout.KNOT_ID_BYTES} bytes of SHA-256" in section("IDENTITY")
    assert layout.TOKENIZER_TENSOR in tensors
    assert layout.DIGESTS_TENSOR in tensors


def test_the_config_has_the_fields_of_the_page_in_its_order() -> None:
    assert [row[0] for row in table(section("CONFIG"))] == list(JSON_NAMES.values())


def test_the_types_that_can_be_computed_with() -> None:
    listed = section("TYPES").replace("\n", " ").split("can be computed")[0].split("ggml's. ")[1]
    assert set(re.findall(r"[A-Z][A-Z0-9_]*", listed)) == COMPUTABLE


def test_every_code_has_its_entry_with_its_severity_and_no_other() -> None:
    entries = re.findall(r'^\.TP\n\.B (\S+)\n\.RI \( "(\w+), (\w+)" \)\.$', section("FINDINGS"), re.M)
    assert entries == [(code, c.severity.value, c.told_by) for code, c in CODES.items()]
