"""The manual says what the program does: generated pages are current, exit statuses whole, every page is clean roff."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from knotctl.cli import COMMANDS, main
from knotctl.core import errors

MAN = Path(__file__).parent.parent / "man"
PAGES = sorted(MAN.glob("*.[1-9]"))


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    """man/generate.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("generate", MAN / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def mandoc() -> str:
    """The mandoc program, or a skip; a failure in CI, which installs it."""
    found = shutil.which("mandoc")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("mandoc is absent")
        pytest.skip("mandoc is absent (.ci/run installs it)")
    return found


def test_generated_pages_are_current(generate: ModuleType) -> None:
    made = generate.pages()
    assert {p.name for p in MAN.glob("knotctl*.1")} == set(made) == {"knotctl.1", *(f"knotctl-{n}.1" for n in COMMANDS)}
    for name, text in made.items():
        assert (MAN / name).read_text() == text, f"{name} is stale: run python man/generate.py"


def test_every_exit_status_of_the_error_tree_is_in_the_manual_and_in_help(
    generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = {
        e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.KnotctlError)
    }
    assert statuses <= set(generate.EXIT_STATUS)
    main(["--help"])
    listed = " ".join(capsys.readouterr().out.split()).partition("Exit status:")[2].partition("Options:")[0]
    assert statuses <= {int(n) for n in re.findall(r"\d+", listed)}


def test_roff_prints_text_as_it_is(generate: ModuleType, mandoc: str) -> None:
    hostile = '.SH not a macro\n\'br\n\\fBback\\slash `tick` ~^ -- "quoted" é …'
    for literal in (False, True):
        body = ".EX\n" + generate.roff(hostile, literal=literal) + "\n.EE\n"
        page = f'.TH X 1 2026-01-01 "x"\n.SH NAME\nx \\- y\n.SH TEXT\n{body}'
        shown = subprocess.run([mandoc, "-T", "utf8"], input=page.encode(), capture_output=True, check=True).stdout
        plain = re.sub(".\b", "", shown.decode())
        for line in hostile.split("\n"):
            assert (line if literal else line.replace("`", "")) in plain


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_pages_are_clean_roff(path: Path, mandoc: str) -> None:
    done = subprocess.run([mandoc, "-T", "lint", "-W", "warning", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_see_also_names_pages_that_exist(path: Path) -> None:
    named = re.findall(r"\.BR (\S+) \((\d)\),?\n", path.read_text().partition(".SH SEE ALSO")[2])
    assert named
    for name, section in named:
        page = name.replace("\\-", "-") + "." + section
        assert (MAN / page).exists(), f"{path.name} refers to {page}"
