"""What the README tells a person to type exists and works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from knotctl.cli import COMMANDS, build_app
from knotctl.core.caches import cache_folder
from knotctl.core.source.demo import DEMO_FILE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def block(language: str, word: str) -> str:
    """The one code block of a language that holds a word."""
    found = [str(text) for kind, text in BLOCKS if kind == language and word in text]
    assert len(found) == 1
    return found[0]


def calls() -> Iterator[tuple[str, str, list[str]]]:
    """The subcommand, the word after it and the options of every call of knotctl in the README's blocks."""
    for kind, text in BLOCKS:
        if kind in ("sh", "yaml"):
            for name, rest in re.findall(r"knotctl ([a-z][\w-]*)(?=([^\n#|]*))", text):
                yield name, (rest.split() or [""])[0], re.findall(r"(?<= )--?[a-z][\w-]*", rest)


def test_every_command_and_option_in_the_readme_exists() -> None:
    root = typer.main.get_command(build_app())
    assert isinstance(root, typer.core.TyperGroup)
    seen = set()
    for name, word, options in calls():
        command = root.commands.get(name)
        if isinstance(command, typer.core.TyperGroup):
            name, command = f"{name} {word}", command.commands.get(word)
        assert command is not None, f"README: knotctl {name}: no such command"
        known = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
        assert set(options) <= known, f"README: knotctl {name}"
        seen |= {name, *options}
    assert {"encode", "verify", "serve", "merge", "run-station", "inspect", "generate", "--top", "--once"} <= seen


def test_every_command_is_in_the_path_table() -> None:
    table = README.partition("## The data path is the tree")[2].partition("<!-- map")[0]
    for name in COMMANDS:
        assert f"`{name}`" in table


def test_the_exit_statuses_are_those_of_the_manual() -> None:
    listed = re.findall(r"^\| (\d+) \| ", README.partition("### Exit status")[2], re.MULTILINE)
    page = (ROOT / "man" / "knotctl.1").read_text().partition(".SH EXIT STATUS")[2].partition(".SH")[0]
    assert listed == re.findall(r"^\.B (\d+)$", page, re.MULTILINE)


def test_links_lead_somewhere() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in t]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), f"README: {target} is not there"


@pytest.mark.model
def test_the_shell_pipeline_runs_as_written(tmp_path: Path, gguf_of: Callable[[str], Path]) -> None:
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    (models / DEMO_FILE).symlink_to(gguf_of("smollm2"))
    (tmp_path / "cache" / "kernels").symlink_to(cache_folder("kernels"))  # compiled once, for all tests
    environment = os.environ | {"PATH": PATH, "KNOTCTL_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    script = block("sh", "shard-embed")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
