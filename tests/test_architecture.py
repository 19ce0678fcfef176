"""The tree is the architecture (DESIGN section 2): imports point one way, each library has its place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "knotctl"

# Rank of each part of the tree; a module imports strictly lower ranks, or its own folder.
RANKS = {
    "core": 0,
    "core/source": 1, "core/kernels": 1, "core/wire": 1, "core/tokens": 1, "core/cluster": 1,
    "core/gguf": 2, "core/knot": 3, "core/tensor": 4, "core/model": 5, "core/engine": 6,
    "services": 7, "commands": 8, "": 9,
}  # fmt: skip

# Library -> the only parts of the tree that may import it.
PLACES = {
    "numba": {"core/kernels"},
    "llvmlite": {"core/kernels"},
    "uvicorn": {"services"},
    "starlette": {"services"},
    "typer": {"commands", ""},
    "tokenizers": {"core/tokens"},
    "minijinja": {"core/tokens"},
    "boto3": {"core/source"},
    "rich": {"commands"},
    "sqlalchemy": {"core/cluster"},
    "psycopg": {"core/cluster"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def folder(path: Path) -> str:
    parent = path.relative_to(PACKAGE).parent.as_posix()
    return "" if parent == "." else parent


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module or "", node.lineno))
            # `from knotctl.core import knot` imports a module too
            found += [(f"{node.module}.{a.name}", node.lineno) for a in node.names]
    return found


def module_folder(name: str) -> str | None:
    """The folder of a knotctl module named in an import, None when it is not a module of ours."""
    parts = name.split(".")
    if parts[0] != "knotctl":
        return None
    target = PACKAGE.joinpath(*parts[1:])
    if target.with_suffix(".py").exists():
        return folder(target.with_suffix(".py"))
    if (target / "__init__.py").exists() and len(parts) > 1:
        return folder(target / "__init__.py")
    return None


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_to_a_lower_rank_or_stay_in_the_folder(path: Path) -> None:
    here = folder(path)
    assert here in RANKS, f"{here} has no rank: put it into DESIGN's order and here"
    for name, line in imports(path):
        there = module_folder(name)
        if there is None or there == here or name in ("knotctl", "knotctl.__version__"):
            continue
        assert RANKS[there] < RANKS[here], f"{path}:{line}: {here or 'top'} imports {name} of rank {RANKS[there]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_each_library_stays_in_its_place(path: Path) -> None:
    for name, line in imports(path):
        places = PLACES.get(name.split(".")[0])
        assert places is None or folder(path) in places, f"{path}:{line}: imports {name}, which belongs in {places}"


def test_files_stay_short() -> None:
    long = {p.relative_to(PACKAGE).as_posix(): n for p in MODULES if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"over 400 lines: is each one noun? {long}"


def test_no_pickle() -> None:
    for path in MODULES:
        assert not [n for n, _ in imports(path) if n.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve")]
