"""man/knot-frame.5 says what the code does: numbers against layout.py, error codes against every raise in core/wire."""

from __future__ import annotations

import ast
import re
import struct
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from knotctl.core.wire import layout

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "man" / "knot-frame.5").read_text()


def section(name: str) -> str:
    return re.split(rf"^\.SH {name}$", PAGE, flags=re.M)[1].split("\n.SH ")[0]


def table(text: str) -> list[list[str]]:
    return [line.split("\t") for line in re.findall(r"^\.TS\n.*?\n(.*?)^\.TE", text, re.M | re.S)[0].splitlines()]


def entries(text: str) -> list[str]:
    return [m.replace("\\-", "-") for m in re.findall(r"^\.TP\n\.B (.*)$", text, re.M)]


@pytest.mark.parametrize(("name", "packed"), [("HEADER", layout.HEADER), ("SEGMENTS", layout.SEGMENT)])
def test_fields_lie_where_the_page_says(name: str, packed: struct.Struct) -> None:
    codes = re.findall(r"(\d*)([sBIQ])", packed.format)
    lengths = [
        length for n, c in codes for length in ([int(n)] if c == "s" else [struct.calcsize(f"<{c}")] * int(n or 1))
    ]
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    assert [(int(a), int(b)) for a, b, _ in table(section(name))] == list(zip(offsets, lengths, strict=True))
    assert sum(lengths) == packed.size


def test_names_and_numbers() -> None:
    head = section("HEADER")
    assert f"magic, the letters {layout.MAGIC.decode()}" in head
    assert f"version, {layout.VERSION}" in head
    assert f"CRC\\-32 of bytes 0 to {layout.HEADER_CRC_OFFSET - 1}" in head
    assert f"The header ({layout.HEADER.size} bytes), the segment table ({layout.SEGMENT.size} bytes a segment)" in PAGE
    assert f"window of at most {layout.ZSTD_MAX_WINDOW} bytes" in section("FLAGS")
    assert f"Position plus rows is at most {layout.MAX_POSITION}." in section("SEGMENTS")


@pytest.mark.parametrize(
    ("name", "enum"),
    [("KIND", layout.Kind), ("DTYPE", layout.DType), ("FLAGS", layout.Flags), ("SEGMENTS", layout.Mode)],
)
def test_every_member_of_an_enumeration_has_its_entry(name: str, enum: type[IntEnum] | type[IntFlag]) -> None:
    assert entries(section(name)) == [f"{m.value} {m.name.lower()}" for m in enum if m.name and m.name != "NONE"]


def test_bytes_of_each_dtype() -> None:
    for dtype in layout.DType:
        entry = section("DTYPE").split(f".B {dtype.value} {dtype.name.lower()}")[1]
        assert re.search(r"(\d) bytes", entry)[1] == str(layout.ELEMENT_BYTES[dtype])  # type: ignore[index]


def test_limits() -> None:
    rows = {name: (int(wire), int(file)) for name, wire, file in table(section("LIMITS"))[1:]}
    wire, file = layout.WIRE_LIMITS, layout.FILE_LIMITS
    assert rows == {
        "payload bytes as stored": (wire.stored, file.stored),
        "payload bytes unpacked": (wire.unpacked, file.unpacked),
        "segments": (wire.segments, file.segments),
        "bytes of metadata": (wire.meta, file.meta),
    }


def raised_codes() -> set[str]:
    """The first argument of every FrameError in core/wire, and of the helpers that are handed a code."""
    codes = set()
    for path in (ROOT / "knotctl" / "core" / "wire").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"FrameError": 0, "enum_member": 2}.get(node.func.id)
                if place is not None and isinstance(node.args[place], ast.Constant):
                    codes.add(node.args[place].value)
    # through the caller's error class of the strict JSON parser
    return codes | {"bad-json", "duplicate-key"}


def test_every_error_code_has_its_entry_and_no_other() -> None:
    assert set(entries(section("ERRORS"))) == raised_codes()
    assert len(entries(section("ERRORS"))) == len(raised_codes())
