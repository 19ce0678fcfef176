"""What is freed is given back to the system, also when it lies between what is still in use."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PROGRAM = """
import re, sys
from pathlib import Path
import numpy as np
if sys.argv[1] == "give back":
    from knotctl.services.heap import give_back_large_blocks
    give_back_large_blocks()

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

np.ones(3 << 20, np.uint8)  # freed, and from now on as large blocks as this one are cut from the heap
before = held()
sessions, kept = [], []
for i in range(40):
    sessions.append(np.ones(2 << 20, np.uint8))
    kept.append(np.ones(100_000, np.uint8))
full = held()
sessions.clear()
print(full - before, held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("way", "left"), [("give back", range(3, 8)), ("left alone", range(60, 100))])
def test_sessions_that_end_leave_no_memory_behind(way: str, left: range) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True)
    full, after = (float(x) for x in re.findall(r"[\d.]+", done.stdout))
    assert full > 80
    assert round(after) in left, f"{after:.1f} MiB"
