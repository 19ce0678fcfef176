"""Findings as JUnit's XML: a suite a knot, a test case a finding code."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from knotctl.core.errors import printable
from knotctl.core.findings import Finding, Severity
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.verify import Verification


def junit(results: Sequence[Verification]) -> str:
    """Return the XML document. A code that took no look (payload not read, no GGUF to compare) is skipped."""
    root = ElementTree.Element("testsuites", name="knotctl verify")
    for r in results:
        _suite(root, r)
    for name in ("tests", "failures", "skipped"):
        root.set(name, str(sum(int(suite.get(name, 0)) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, r: Verification) -> None:
    read = r.data_bytes is not None or r.proved_before
    looked = {"structure"} | ({"data"} if read else set()) | ({"source"} if r.against else set())
    suite = ElementTree.SubElement(root, "testsuite", name=printable(r.path, 4096))
    failures = skipped = 0
    for code, c in CODES.items():
        case = ElementTree.SubElement(suite, "testcase", classname=printable(r.path, 4096), name=code)
        found = [f for f in r.findings if f.code == code]
        text = "\n".join(_line(f) for f in found)
        if found and c.severity is Severity.ERROR:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", type=code, message=_line(found[0]))
            failure.text = text
        elif found:
            ElementTree.SubElement(case, "system-out").text = text
        elif c.told_by not in looked:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=f"not looked at: {c.told_by}")
    for name, value in (("tests", len(CODES)), ("failures", failures), ("errors", 0), ("skipped", skipped)):
        suite.set(name, str(value))


def _line(f: Finding) -> str:
    parts = ["" if f.offset is None else f"byte {f.offset}: ", "" if f.tensor is None else f"{f.tensor}: ", f.message]
    return printable("".join(parts) + (f" (fix: {f.repair})" if f.repair else ""), 2000)
