"""Predicted times: the fastest route through what nodes hold, to the first token and per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from knotctl.core.cluster.capacity import Capacity
from knotctl.core.cluster.layers import ModelLayers
from knotctl.core.cluster.policy import Policy
from knotctl.core.spans import LayerSpan

# A prompt passes the stages in chunks of so many tokens, a stage working on one while the next works on the one before.
CHUNK_TOKENS = 512

Stage = tuple[Capacity, LayerSpan]


@dataclass(frozen=True, slots=True)
class Times:
    """What a route takes. Units: of SECOND; token and first_token of one stream, bottleneck its slowest stage."""

    token: int
    first_token: int
    bottleneck: int
    hops: int


def fastest_route(served: Iterable[Stage], model: ModelLayers, hop: int) -> list[Stage] | None:
    """Return the stages that a token passes quickest, None where a layer has no node.

    A stage may serve a part of what its node holds. Of nodes with the same layers only the fastest matters.
    """
    fastest: dict[LayerSpan, Capacity] = {}
    alone: tuple[int, str, Capacity] | None = None
    for c, span in served:
        known = fastest.get(span)
        if known is None or (c.step, c.node_id) < (known.step, known.node_id):
            fastest[span] = c
    if (whole := fastest.get(model.span)) is not None:
        alone = (whole.time_of(model.span), whole.node_id, whole)
    found = _shortest(fastest, model, hop)
    if found is None:
        return None
    cost, stages = found
    if alone is not None and alone[0] <= cost:
        return [(alone[2], model.span)]
    return _each_once(stages)


def _shortest(fastest: dict[LayerSpan, Capacity], model: ModelLayers, hop: int) -> tuple[int, list[Stage]] | None:
    n, work = model.n_layers, model.work
    starts: dict[int, list[tuple[LayerSpan, Capacity]]] = {}
    for span, c in sorted(fastest.items(), key=lambda item: (item[0], item[1].node_id)):
        starts.setdefault(span.start, []).append((span, c))
    cost: list[int] = [0]
    came: list[tuple[int, Capacity]] = []
    active: list[_Visit] = []
    for layer in range(n):
        active = [v for v in active if v.end > layer]
        active += [_Visit(span.end, c) for span, c in starts.get(layer, ())]
        if not active:
            return None
        best: tuple[int, _Visit] | None = None
        for v in active:
            step = v.capacity.step
            here = cost[layer] - step * work[layer]
            if v.value is None or here < v.value:
                v.value, v.entered = here, layer
            total = v.value + step * work[layer + 1] + hop
            if layer == n - 1:
                total += step * model.head_work
            if best is None or total < best[0]:
                best = total, v
        assert best is not None
        cost.append(best[0])
        came.append((best[1].entered, best[1].capacity))
    stages: list[Stage] = []
    end = n
    while end > 0:
        start, c = came[end - 1]
        stages.append((c, LayerSpan(start, end)))
        end = start
    stages.reverse()
    return cost[n] - (hop if len(stages) == 1 else 0), stages


class _Visit:
    """A node at work while layers pass by: value is the cheapest cost so far less its own time up to there."""

    __slots__ = ("capacity", "end", "entered", "value")

    def __init__(self, end: int, capacity: Capacity) -> None:
        self.end, self.capacity, self.entered = end, capacity, 0
        self.value: int | None = None


def _each_once(stages: Sequence[Stage]) -> list[Stage]:
    """The route with what lies between two visits of a node done by that node, which holds it: a visit is a session."""
    once: list[Stage] = []
    for c, span in stages:
        seen = next((i for i, (other, _) in enumerate(once) if other is c), None)
        if seen is None:
            once.append((c, span))
        else:
            once[seen:] = [(c, LayerSpan(once[seen][1].start, span.end))]
    return once


def times_of(route: Sequence[Stage], model: ModelLayers, policy: Policy) -> Times:
    """Return the predicted times of a route."""
    # Forward from each stage to the next, and the ids from the tail back to the head.
    hops = len(route) if len(route) > 1 else 0
    per_stage = [c.time_of(span) for c, span in route]
    token = sum(per_stage) + hops * policy.hop(model.hidden_size)
    chunk = min(CHUNK_TOKENS, policy.prompt_tokens)
    chunks = -(-policy.prompt_tokens // chunk)
    hop = policy.hop(model.hidden_size, chunk) if hops else 0
    work = [chunk * c.prefill_step * (model.work[span.end] - model.work[span.start]) for c, span in route]
    # The output matrix is asked for the last token of the prompt alone.
    last = route[-1][0].step * model.head_work
    filled = sum(work) + hops * hop + (chunks - 1) * max((w + hop for w in work), default=0)
    return Times(token, filled + last, max(per_stage, default=0), hops)
