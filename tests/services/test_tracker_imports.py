"""A tracker never loads weights: its process imports neither numba nor the kernels, nor what computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys, threading, signal
from knotctl.cli import main

def look():
    import time, urllib.request, urllib.error
    from knotctl.services.server import Server
    while not started:
        time.sleep(0.02)
    for path in ("/health", "/readyz", "/coverage", "/v1/models"):
        try:
            urllib.request.urlopen(started[0] + path).read()
        except urllib.error.HTTPError:
            pass
    os.kill(os.getpid(), signal.SIGTERM)

import knotctl.services.server as server
started = []
original = server.Server.run_on
def run_on(self, listener):
    started.append(server.url_of(listener))
    original(self, listener)
server.Server.run_on = run_on
threading.Thread(target=look).start()
assert main(["serve", sys.argv[1], "--tracker-only", "--port", "0"]) == 0
heavy = [m for m in sys.modules if m.split(".")[0] in ("numba", "llvmlite")]
ours = [m for m in sys.modules if m.startswith(("knotctl.core.kernels", "knotctl.core.model", "knotctl.core.tensor"))]
assert not heavy + ours, heavy[:3] + ours
print("light")
"""


def test_a_tracker_imports_nothing_that_computes(tiny_knot: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_knot)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("light")
