"""Write what the documents take from the code: man/knotctl*.1 from the command tree, the module map from the tree.

    python man/generate.py            write what differs
    python man/generate.py --check    name what differs, exit 1

A command's page is its help: the docstring's first paragraph is NAME, one that begins with "Exit status:" EXIT STATUS,
the block that begins with \\b and "Examples:" EXAMPLES, the rest DESCRIPTION; options read as --help prints them.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from pathlib import Path
from typing import Any

import typer

from knotctl import __version__
from knotctl.cli import COMMANDS, build_app

ROOT = Path(__file__).parent.parent
DATE = "2026-11-30"  # of the version: a page must not change with the day it is made on

EXIT_STATUS = {
    0: "Done.",
    1: "The check failed: findings of severity error, gaps in a plan, a bench below its floor.",
    2: "Usage: what was asked for makes no sense; nothing was tried.",
    3: "Bytes break a format.",
    4: "Bytes could not be had, or not be put where they belong.",
    5: "The model cannot run here: an unsupported architecture or type, a missing tensor, another model's identity.",
    6: "The memory budget cannot be met; the message holds the table that shows why.",
    70: "A bug in knotctl: run again with `--debug` and report the traceback.",
    130: "Interrupted.",
    141: "The reader of a pipe left; nothing is said.",
}
ENVIRONMENT = {
    "KNOTCTL_COMMAND_OPTION": "Sets an option of a command, as KNOTCTL_SERVE_PORT sets `knotctl serve --port`; "
    "the command line goes before it.",
    "KNOTCTL_CACHE_DIR": "The cache folder, in place of the one under FILES.",
    "KNOTCTL_DEBUG": "As `--debug`.",
    "KNOTCTL_DATABASE": "The ledger's database, as `--database` of `knotctl ledger` and `knotctl keys`.",
    "XDG_CACHE_HOME": "Where the cache folder lies, when absolute.",
}
CACHE = {
    "~/.cache/knotctl": "The cache folder: the demo model, knots made from GGUF files, compiled kernels. "
    "It can be deleted at any time; knotctl makes it again.",
}
USES_CACHE = {"pull", "serve"}
SEE_ALSO = ["knot(5)", "knot-frame(5)", "knot-service(5)", "knot-glossary(7)"]
# Command -> the pages that concern it alone.
SEE_MORE = {
    "plan-coverage": ["knot-cluster(7)"], "keys": ["knot-ledger(7)"], "ledger": ["knot-ledger(7)"],
}  # fmt: skip

# The tree in the order of the data path (DESIGN section 2), after the outside and the vocabulary that all parts share.
FOLDERS = [
    "", "commands", "core", "core/source", "core/gguf", "core/knot", "core/tensor", "core/kernels", "core/model",
    "core/wire", "core/engine", "core/tokens", "core/cluster", "services",
]  # fmt: skip


def roff(text: str, *, literal: bool = False) -> str:
    """Return text as roff that prints it as it is; outside literal text, `words` and --options are bold."""
    named = {"\\": "\\e", "'": "\\(aq", "`": "\\(ga", "~": "\\(ti", "^": "\\(ha", "-": "\\-"}
    if literal:
        text = "".join(named.get(c, c) for c in text)
    else:
        words = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][a-z-]*)", text)
        bold = [f"\\fB{roff(w.strip('`'), literal=True)}\\fR" if i % 2 else w for i, w in enumerate(words)]
        text = "".join(w if i % 2 else w.replace("\\", "\\e") for i, w in enumerate(bold))
    text = "".join(c if ord(c) < 128 else f"\\[u{ord(c):04X}]" for c in text)
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def sentences(text: str) -> str:
    """Return a paragraph as roff, a sentence a line, as roff spaces sentences only there."""
    return roff(re.sub(r"(?<=[.:;?]) (?=[A-Z`])", "\n", " ".join(text.split())))


def terms(rows: dict[str, str]) -> str:
    """Return a list of bold terms, each with its text indented below."""
    return "\n".join(f".TP\n.B {roff(term, literal=True)}\n{sentences(text)}" for term, text in rows.items())


def paragraphs(text: str) -> tuple[str, str, str]:
    """Return the description, the exit statuses and the examples of a docstring as roff."""
    body, status, examples = [], "", ""
    for block in re.split(r"\n\s*\n", text.strip()):
        preformatted, lines = block.startswith("\b"), block.strip("\b\n").split("\n")
        if preformatted and lines[0] == "Examples:":
            examples = ".EX\n" + "\n".join(roff(x, literal=True) for x in lines[1:]) + "\n.EE"
        elif preformatted:
            body.append(".PP\n.EX\n" + "\n".join(roff(x, literal=True) for x in lines) + "\n.EE")
        elif block.startswith("Exit status:"):
            status = sentences(block.removeprefix("Exit status:")) + "\n"
        else:
            body.append(".PP\n" + sentences(block))
    return "\n".join(body).removeprefix(".PP\n"), status, examples


def page(name: str, short: str, sections: dict[str, str]) -> str:
    """Return a whole page; sections without text are left out."""
    # NAME is one line in lower case, as apropos reads it
    short = short.strip().removesuffix(".")
    short = short if short[:2].isupper() else short[0].lower() + short[1:]
    head = f""".\\" Made by man/generate.py from the program itself: change it there.
.TH {roff(name.upper(), literal=True)} 1 {DATE} "knotctl {__version__}"
.SH NAME
{roff(name, literal=True)} \\- {roff(short)}"""
    body = "".join(f".SH {title}\n{text}\n" for title, text in sections.items() if text)
    return f"{head}\n{body}"


def see_also(names: list[str]) -> str:
    """Return references to other pages, a line each, with commas."""
    return ",\n".join(re.sub(r"(.*)(\(\d\))", lambda m: f".BR {roff(m[1], literal=True)} {m[2]}", n) for n in names)


def pages() -> dict[str, str]:
    """Return every generated page by file name, deterministic."""
    root = typer.main.get_command(build_app())
    assert isinstance(root, typer.core.TyperGroup)
    context = root.context_class(root, info_name="knotctl", **root.context_settings)
    description, _, examples = paragraphs((root.help or "").split("\n", 1)[1])
    made = {
        "knotctl.1": page("knotctl", (root.help or "").split("\n")[0], {
            "SYNOPSIS": ".B knotctl\n[options] command [arguments]",
            "DESCRIPTION": description,
            "OPTIONS": terms(records(root, context, "option")),
            "COMMANDS": terms({f"knotctl-{n}(1)": summary(c) for n, c in ordered(root)}),
            "EXIT STATUS": terms({str(k): v for k, v in EXIT_STATUS.items()}),
            "ENVIRONMENT": terms(ENVIRONMENT),
            "FILES": terms(CACHE),
            "EXAMPLES": examples,
            "SEE ALSO": see_also([*(f"knotctl-{n}(1)" for n in COMMANDS), *SEE_ALSO]),
        })
    }  # fmt: skip
    for name, command in ordered(root):
        inner = command.context_class(command, info_name=name, parent=context, **command.context_settings)
        made[f"knotctl-{name}.1"] = page(f"knotctl-{name}", summary(command), sections(name, command, inner))
    return made


def sections(name: str, command: Any, context: Any) -> dict[str, str]:
    """Return the sections of a command's page; a group's lists each of its commands with arguments and options."""
    description, status, examples = paragraphs((command.help or "").partition("\n\n")[2])
    members = [
        (f"{name} {n}", c, c.context_class(c, info_name=n, parent=context, **c.context_settings))
        for n, c in getattr(command, "commands", {}).items()
    ]
    statuses = [f"{n}: {s}" for n, c, _ in members if (s := paragraphs((c.help or "").partition("\n\n")[2])[1])]
    every = [(command, context), *((c, inner) for _, c, inner in members)]
    return {
        "SYNOPSIS": "\n.br\n".join(synopsis(n, c) for n, c, _ in members or [(name, command, context)]),
        "DESCRIPTION": description or sentences(summary(command)),
        "COMMANDS": "\n".join(member(n, c, inner) for n, c, inner in members),
        "ARGUMENTS": terms(records(command, context, "argument")),
        "OPTIONS": "" if members else terms(records(command, context, "option")),
        "EXIT STATUS": ("".join([status, *statuses]) or "0 when done.\n") + "All statuses are in\n.BR knotctl (1).",
        "ENVIRONMENT": variables(every),
        "FILES": terms(CACHE) if name in USES_CACHE else "",
        "EXAMPLES": examples,
        "SEE ALSO": see_also(["knotctl(1)", *SEE_MORE.get(name, []), *SEE_ALSO]),
    }


def synopsis(name: str, command: Any) -> str:
    """Return how a command is called, as one line of roff in bold and one in roman."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = " ".join(argument_word(p) if p.required else f"[{argument_word(p)}]" for p in arguments)
    return f".B knotctl {roff(name, literal=True)}\n[options] {roff(words)}".rstrip()


def member(name: str, command: Any, context: Any) -> str:
    """Return a command of a group as a subsection: what it does, its arguments and its options."""
    description, _, _ = paragraphs((command.help or "").partition("\n\n")[2])
    text = sentences(summary(command)) + ("\n.PP\n" + description if description else "")
    rows = records(command, context, "argument") | records(command, context, "option")
    rows.pop("-h, --help", None)
    return f".SS {roff(name, literal=True)}\n{text}\n{terms(rows)}"


def ordered(root: Any) -> list[tuple[str, Any]]:
    """Return the commands in the order of the data path."""
    return [(name, root.commands[name]) for name in COMMANDS]


def summary(command: Any) -> str:
    """Return the first paragraph of a command's help."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def argument_word(argument: Any) -> str:
    """Return an argument as a synopsis writes it, less the brackets of one that can be left out."""
    return str(argument.metavar or argument.name).strip("[].").upper() + ("..." if argument.nargs == -1 else "")


def records(command: Any, context: Any, kind: str) -> dict[str, str]:
    """Return options or arguments with their help, as --help prints them less variables and the types of arguments."""
    rows = {}
    for p in command.get_params(context):
        if p.param_type_name == kind:
            p.show_envvar = False
            if record := p.get_help_record(context):
                rows[argument_word(p) if kind == "argument" else record[0]] = record[1]
    return rows


def variables(commands: list[tuple[Any, Any]]) -> str:
    """Return the variables that set the options of these commands, each with its context."""
    names: dict[str, None] = {}
    for command, context in commands:
        for p in command.params:
            if p.param_type_name == "option":
                names[p.envvar or f"{context.auto_envvar_prefix}_{p.name.upper()}"] = None
    return sentences("Options can also be set by " + ", ".join(f"`{n}`" for n in names) + ".") if names else ""


def module_map() -> str:
    """Return the README's map: every module in path order, with the first line of its docstring."""
    lines = []
    for folder in FOLDERS:
        package = ROOT / "knotctl" / folder
        files = {p.stem: p for p in package.glob("*.py") if p.stem != "__init__"}
        title = f"knotctl/{folder}".rstrip("/") + "/"
        lines += [f"\n**`{title}`** {first_line(package / '__init__.py')}\n"]
        lines += [f"- [`{m}.py`]({title}{m}.py): {first_line(files[m])}" for m in in_order_of_use(files)]
    return "\n".join(lines).strip("\n")


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].removesuffix(".") + "."


def in_order_of_use(files: dict[str, Path]) -> list[str]:
    """Return a folder's modules, each after those it imports there; else as --help lists them, or by name."""
    listed = [target.partition(":")[0] for target in COMMANDS.values()]
    uses: dict[str, set[str]] = {}
    for name, path in files.items():
        # What is imported late, inside a function, may point back.
        froms = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
        here = ".".join(path.relative_to(ROOT).parent.parts)
        found = {n.module.removeprefix(here + ".") for n in froms if n.module and n.module.startswith(here + ".")}
        found |= {a.name for n in froms if n.module == here for a in n.names}
        uses[name] = found & files.keys() - {name}
    sorter, order = graphlib.TopologicalSorter(uses), []
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=lambda m: (listed.index(m) if m in listed else len(listed), m))
        order += ready
        sorter.done(*ready)
    return order


def replaced(text: str, block: str, content: str) -> str:
    """Return the text with what stands between the block's marks replaced."""
    start, end = f"<!-- {block} (made by man/generate.py) -->\n", f"\n<!-- end of {block} -->"
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    assert found, f"README.md: no block {block!r}"
    return before + start + content + end + after


def documents() -> dict[Path, str]:
    """Return every document that takes something from the code, as it should read."""
    readme = ROOT / "README.md"
    made = {ROOT / "man" / name: text for name, text in pages().items()}
    made[readme] = replaced(readme.read_text(), "map", module_map())
    return made


def main(argv: list[str]) -> int:
    """Write the documents that differ, or only name them; return the exit status."""
    made = documents()
    differ = [p for p, text in made.items() if not p.exists() or p.read_text() != text]
    stale = [p for p in (ROOT / "man").glob("knotctl*.1") if p not in made]
    for path in differ + stale:
        print(path.relative_to(ROOT))
    if argv == ["--check"]:
        return 1 if differ + stale else 0
    for path in differ:
        path.write_text(made[path])
    for path in stale:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
