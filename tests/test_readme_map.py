"""The README's map and the tree are the same: every module once, in its folder, with its own first line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAP = README.partition("<!-- map")[2].partition("<!-- end of map -->")[0]
ENTRIES = re.findall(r"^- \[`(.+?)`\]\((.+?)\): (.+)$", MAP, re.MULTILINE)
REMEDY = "the README's map is stale: run python man/generate.py"


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path}: no docstring"
    return docstring.split("\n")[0].rstrip(".")


def test_every_module_is_in_the_map_once() -> None:
    tree = {p.relative_to(ROOT).as_posix() for p in (ROOT / "knotctl").rglob("*.py") if p.name != "__init__.py"}
    mapped = [path for _, path, _ in ENTRIES]
    assert len(mapped) == len(set(mapped))
    assert set(mapped) == tree, REMEDY


def test_every_line_is_the_first_of_the_module() -> None:
    for name, path, line in ENTRIES:
        assert Path(path).name == name
        assert line.rstrip(".") == first_line(ROOT / path), REMEDY


def test_every_folder_is_in_the_map_once_in_the_order_of_the_data_path() -> None:
    folders = re.findall(r"^\*\*`(.+?)/`\*\* ", MAP, re.MULTILINE)
    tree = [p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "knotctl").rglob("__init__.py")]
    assert sorted(folders) == sorted(tree), REMEDY
    path = ["source", "gguf", "knot", "tensor", "model", "wire", "engine", "tokens"]
    places = [folders.index(f"knotctl/core/{part}") for part in path]
    assert places == sorted(places)
