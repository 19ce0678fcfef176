"""What a shell meets first: a quick --help, completion, the version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from knotctl import __version__
from knotctl.cli import COMMANDS, SUMMARIES, build_app, main

# What costs a tenth of a second or more, or is of no use to one who asks for help.
HEAVY = {"numba", "llvmlite", "numpy", "boto3", "botocore", "tokenizers", "minijinja", "starlette", "uvicorn", "rich"}


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    script = f"import sys; from knotctl.cli import main; rc = main({argv}); print(*sys.modules); sys.exit(rc)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "typer" in modules
    assert HEAVY.isdisjoint(m.split(".")[0] for m in modules)


def test_what_the_root_says_of_a_command_is_what_it_says_itself() -> None:
    root = typer.main.get_command(build_app())
    assert isinstance(root, typer.core.TyperGroup)
    assert {name: (c.help or "").strip().splitlines()[0] for name, c in root.commands.items()} == SUMMARIES
    assert list(SUMMARIES) == list(COMMANDS)


def test_the_root_imports_no_command_and_a_command_no_other() -> None:
    for argv, expected in ((["--help"], set()), (["verify", "--help"], {"verify"})):
        script = f"import sys; from knotctl.cli import main; rc = main({argv}); print(*sys.modules); sys.exit(rc)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        modules = done.stdout.splitlines()[-1].split()
        loaded = {m.removeprefix("knotctl.commands.") for m in modules if m.startswith("knotctl.commands.")}
        assert loaded & {name.replace("-", "_") for name in COMMANDS} == expected


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"knotctl {__version__}\n"


def test_bash_completes_commands_and_options() -> None:
    script = """
    eval "$(knotctl --show-completion bash)"
    COMP_WORDS=(knotctl pu) COMP_CWORD=1; _knotctl_completion knotctl; echo "${COMPREPLY[@]}"
    COMP_WORDS=(knotctl pull --js) COMP_CWORD=2; _knotctl_completion knotctl; echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["pull", "--json"], done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json_and_says_what_its_options_do(name: str) -> None:
    root = typer.main.get_command(build_app())
    assert isinstance(root, typer.core.TyperGroup)
    command = root.commands[name]
    for member in getattr(command, "commands", {name: command}).values():
        json = {p.name for p in member.params if "--json" in p.opts}
        assert json == {"json"}, "scripts set KNOTCTL_COMMAND_JSON everywhere"
        for p in member.params:
            assert getattr(p, "help", None), f"{name}: {p.opts[0]}: no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_examples_of_itself(name: str) -> None:
    root = typer.main.get_command(build_app())
    assert isinstance(root, typer.core.TyperGroup)
    examples = (root.commands[name].help or "").partition("\b\nExamples:\n")[2].splitlines()
    assert any(line.startswith("$ ") and f"knotctl {name}" in line for line in examples)
