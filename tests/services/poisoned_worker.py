"""knotctl, but for stations that die over any session that has come to so many tokens: what a poison request does.

DEADLY says which: those with the first layer, or those with the last.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from knotctl.core.model.station import Station

TOKENS = 40


def forward(station: Station, frame: Any, *more: Any, _forward: Any = Station.forward) -> Any:
    deadly = station.span.start == 0 if os.environ["DEADLY"] == "first" else station.span.end == station.config.n_layers
    if deadly and any(s.position + s.n_tokens > TOKENS for s in frame.segments):
        os.kill(os.getpid(), signal.SIGKILL)
    return _forward(station, frame, *more)


if __name__ == "__main__":
    Station.forward = forward  # type: ignore[method-assign]
    from knotctl.cli import main

    sys.exit(main(sys.argv[1:]))
