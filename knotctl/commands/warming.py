"""Compiling the kernels, once for this machine, where the user can see it."""

from __future__ import annotations

import time


def warm_kernels(knot: str | None = None) -> None:
    """Have the kernels compiled, with a message and a bar, where this machine has not yet.

    What is wrong with the knot, where one is named, is said before that minute and not after it.
    """
    import subprocess
    import sys

    from knotctl.core.kernels.warm import is_warm
    from knotctl.core.knot.reader import open_knot

    if is_warm():
        return
    if knot is not None:
        open_knot(knot).close()
    # In a process of its own: the compiler leaves 200 MiB behind, which no memory budget of this one has counted.
    command = [sys.executable, "-m", "knotctl", "warm", "--json"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    compile_kernels()


def compile_kernels() -> None:
    """Compile the kernels in this process, with a message and a bar, where this machine has not yet."""
    from knotctl.commands.console import progress, say
    from knotctl.core.kernels.warm import is_warm, steps, warm

    if is_warm():
        return
    say("knotctl: compiling kernels for this CPU (once; later starts take them from the cache folder) …")
    started = time.perf_counter()
    with progress("compile kernels", steps(), unit="steps") as advance:
        warm(advance)
    say(f"knotctl: kernels compiled in {time.perf_counter() - started:.0f} s")
