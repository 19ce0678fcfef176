"""Why the nodes of a route have the layers they have, in words."""

from __future__ import annotations

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.chain import Chain
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.speed import SECOND
from knotctl.core.spans import LayerSpan


def reasons(chain: Chain, model: ModelLayers) -> list[str]:
    """Return for each stage of a chain why its node has its layers."""
    if len(chain.stages) == 1 and not chain.gap_layers:
        return [f"holds all {model.n_layers} layers by itself: no hop, and no route of these nodes is faster"]
    speeds = sorted({c.step for c, _ in chain.stages})
    words = []
    for c, span in chain.stages:
        if is_full(c, span):
            size = f"filled: {layers(len(span))}, all that fit"
        else:
            remain = "remains" if len(span) == 1 else "remain"
            size = f"{layers(len(span))} that {remain}, with room for {c.most_layers}"
        words.append(f"{size}; {_rank(c, speeds, len(chain.stages))}")
    return words


def is_full(c: Capacity, span: LayerSpan) -> bool:
    """Say whether no further layer, on either side, fits beside these."""
    more_behind = span.end < c.model.n_layers and c.fits(span.start, span.end + 1)
    more_before = span.start > 0 and c.fits(span.start - 1, span.end)
    return not more_behind and not more_before


def speed_text(c: Capacity) -> str:
    """Return a node's speed on the whole of this model, for people."""
    return f"{SECOND / (c.step * c.model.total_work):.3g} tokens/s of this model"


def layers(count: int) -> str:
    """Return so many layers in words."""
    return f"{count} layer{'' if count == 1 else 's'}"


def _rank(c: Capacity, speeds: list[int], stages: int) -> str:
    if len(speeds) == 1:
        return f"as fast as the others, {speed_text(c)}"
    place = speeds.index(c.step)
    name = "fastest" if not place else "slowest" if place == len(speeds) - 1 else f"number {place + 1} in speed"
    return f"{name} of the {stages} of the route, {speed_text(c)}"
