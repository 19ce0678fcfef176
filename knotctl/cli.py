"""The typer app and `main(argv) -> exit code`, the one place where errors become words and an exit status."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from knotctl import __version__
from knotctl.commands.console import print_error
from knotctl.core.errors import KnotctlError, UsageError

# Subcommand -> "module:function" under knotctl.commands, in the order of the data path: the order of --help and man.
# Where it names a typer app instead, the subcommand is a group of more of them.
COMMANDS: dict[str, str] = {
    "encode": "encode:encode",
    "verify": "verify:verify",
    "repair": "repair:repair",
    "inspect": "inspect:inspect",
    "pull": "pull:pull",
    "tokenize": "tokenize:tokenize",
    "shard-embed": "shard_embed:shard_embed",
    "merge": "merge:merge",
    "run-station": "run_station:run_station",
    "warden": "warden:warden",
    "generate": "generate:generate",
    "bench": "bench:bench",
    "warm": "warm:warm",
    "plan-coverage": "plan_coverage:plan_coverage",
    "serve": "serve:serve",
    "keys": "keys:keys",
    "ledger": "ledger:ledger",
}

# Beside them, what `knotctl --help` says of each: the first line of its function's docstring, which a test compares.
# The root's help then imports no command, and one command's start none of the others.
SUMMARIES: dict[str, str] = {
    "encode": "Encode a GGUF into a knot.",
    "verify": "Check knots and report every defect, with its place and the command that mends it.",
    "repair": "Write a canonical copy of a knot whose layout or header is wrong and whose bytes are right.",
    "inspect": "Show what a knot, a GGUF or a frame holds.",
    "pull": "Fetch a model file, check it, and print its path.",
    "tokenize": "Print the token ids of a text and the piece of text that each stands for.",
    "shard-embed": "Embed tokens with one shard of the vocabulary: a partial embedding as a frame, or over HTTP.",
    "merge": "Merge the partial embeddings of all shards into hidden states.",
    "run-station": "Run layers A to B of a model over hidden states and write what comes out, or serve that over HTTP.",
    "warden": "Serve a cache of a knot's rows or layer tensors to the shards or stations of a host.",
    "generate": "Generate text from a prompt with shards and stations in this process.",
    "bench": "Measure prompt and generated tokens per second, their spread, and the peak memory.",
    "warm": "Compile the kernels for this CPU into the cache folder, or find them there.",
    "plan-coverage": "Plan which node holds which layers: every layer first, then the fastest route, then copies.",
    "serve": "Serve a model with OpenAI's API.",
    "keys": "Make, list and revoke API keys.",
    "ledger": "Keep accounts, credits and prices, and prove that the books balance.",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"knotctl {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error; works anywhere.")] = False,
) -> None:
    """Encode, verify, split and serve language models that do not fit one machine.

    A MODEL is a path; a size is bytes or 128MiB, 1GiB; `-` is stdin or stdout. With --json one JSON document goes to
    stdout, people's text and progress go to stderr. Every option can be set by KNOTCTL_COMMAND_OPTION.

    Exit status: 0 done; 1 the check failed; 2 usage; 3 bytes break a format; 4 bytes could not be had;
    5 model cannot run here; 6 budget cannot be met; 70 our bug; 130 interrupted.
    """


def build_app(names: Iterable[str] = COMMANDS, *, summaries: bool = False) -> typer.Typer:
    """Return the typer app with the commands of these names: whole, or as no more than their summaries."""
    app = typer.Typer(
        name="knotctl",
        no_args_is_help=True,
        # Rich's help costs 0.1 s a start and frames that scripts cannot grep; plain help is quick, man pages richer.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"auto_envvar_prefix": "KNOTCTL", "help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in names:
        if summaries:
            app.command(name, help=SUMMARIES[name])(_never_run)
            continue
        module, function = COMMANDS[name].split(":")
        command = getattr(importlib.import_module(f"knotctl.commands.{module}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _never_run() -> None:
    """Stand for a command where only its summary is shown."""


def _app_for(argv: list[str]) -> typer.Typer:
    """Return the app that a command line needs."""
    first = next((a for a in argv if not a.startswith("-")), None)
    if "_KNOTCTL_COMPLETE" in os.environ or any("completion" in a for a in argv):
        return build_app()
    if first is None or argv[0] in ("-h", "--help"):
        return build_app(summaries=True)
    return build_app([first] if first in COMMANDS else COMMANDS)


def _print_traceback() -> None:
    import traceback  # 6 ms that no start without an error pays for

    traceback.print_exc()


def main(argv: list[str]) -> int:
    """Run one command line and return its exit status; nothing but the status leaves this function.

    Raises: nothing. Errors of ours are printed in words, others as our bug (70), with a traceback under --debug.
    """
    debug = "--debug" in argv or bool(os.environ.get("KNOTCTL_DEBUG"))
    as_json = "--json" in argv
    try:
        status = _app_for(argv)([a for a in argv if a != "--debug"], prog_name="knotctl", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except typer.TyperException as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            print(e.format_message(), file=sys.stderr)
            return 2
        command = getattr(getattr(e, "ctx", None), "command_path", "knotctl")
        print_error(UsageError("usage", e.format_message(), hint=f"see {command} --help"), as_json)
        return 2
    except KnotctlError as e:
        if debug:
            _print_traceback()
        print_error(e, as_json)
        return e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader left (`| head`): say nothing, and keep Python from failing again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as e:
        if debug:
            _print_traceback()
        hint = None if debug else "this is a bug in knotctl: run again with --debug and report the traceback"
        print_error(KnotctlError("internal", f"{type(e).__name__}: {e}", hint=hint), as_json)
        return 70
