"""A plan as text for people: what it gives, the picture, each node with its reason, then what to know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from knotctl.core.cluster.speed import SECOND, time_text
from knotctl.core.sizes import format_size

if TYPE_CHECKING:
    from knotctl.core.cluster.planner import Plan

# Rows of nodes and moves beyond this are for --json.
_MOST_ROWS = 40


def plan_lines(plan: Plan, *, plain: bool) -> Iterator[str]:
    """Yield the report's lines; `plain` where the terminal has no block characters."""
    from knotctl.core.cluster.document import document_of
    from knotctl.core.cluster.picture import BLOCKS, PLAIN, picture

    document = document_of(plan)
    yield from _summary(document)
    yield ""
    yield from picture(plan, blocks=PLAIN if plain else BLOCKS)
    if document["assignments"]:
        yield ""
        yield from _nodes(document)
    if document["idle"]:
        yield ""
        for row in document["idle"][:_MOST_ROWS]:
            yield f"{row['node_id']} has no layers: {row['reason']}"
        yield from _more(len(document["idle"]), "nodes without layers")
    if document["directives"]:
        yield ""
        yield from _moves(document)
    if document["warnings"]:
        yield ""
        for w in document["warnings"]:
            yield f"{w['code']}: {w['message']}"


def _summary(document: dict[str, Any]) -> Iterator[str]:
    p, count = document["predicted"], len(document["assignments"])
    nodes = f"{count} node{'' if count == 1 else 's'} of {count + len(document['idle'])}"
    if not document["covered"]:
        gaps = ", ".join(f"{a}:{b}" for a, b in document["gaps"])
        yield f"{document['model']}: {document['n_layers']} layers, NOT covered by {nodes}: gaps {gaps}"
        return
    yield f"{document['model']}: {document['n_layers']} layers, covered by {nodes}"
    hops = f", {p['hops']} hops of {p['hop_ms']:.3g} ms among them" if p["hops"] else ", no hops"
    yield (
        f"a token takes {_time(p['token_ms'])} ({p['tokens_per_s']:.3g} tokens/s){hops}; "
        f"the first of a prompt of {p['prompt_tokens']} comes after {_time(p['ttft_ms'])}"
    )
    if p["best_token_ms"]:
        proof = "the best plan of these nodes, by exact search," if p["best_is_exact"] else "no plan of these nodes"
        verb = "takes" if p["best_is_exact"] else "takes less than"
        yield f"{proof} {verb} {_time(p['best_token_ms'])}: {p['distance']:.1%} from it"
    text = f"many streams together: {p['pipeline_tokens_per_s']:.3g} tokens/s"
    if p["context_tokens"] is not None:
        text += f"; keys and values for {p['context_tokens']:,} tokens"
    if p["load_bytes"]:
        text += f"; {format_size(p['load_bytes'])} to load, the longest takes {p['load_s']:.0f} s"
    yield text


def _nodes(document: dict[str, Any]) -> Iterator[str]:
    rows = sorted(document["assignments"], key=lambda a: (a["role"] != "route", a["start_layer"], a["node_id"]))
    for a in rows[:_MOST_ROWS]:
        part = "+".join(w for w, yes in (("head", a["is_head"]), ("tail", a["is_tail"])) if yes)
        yield (
            f"{a['node_id']}: {a['start_layer']}:{a['end_layer']} at {a['quantization']}, {a['role']}"
            f"{f', {part}' if part else ''}, {format_size(a['weight_bytes'])} of weights, {_time(a['stage_ms'])}"
        )
        yield f"    {a['reason']}"
        yield f"    if it leaves: {a['if_it_leaves']}"
    yield from _more(len(rows), "nodes")


def _moves(document: dict[str, Any]) -> Iterator[str]:
    rows = document["directives"]
    for d in rows[:_MOST_ROWS]:
        yield (
            f"round {d['round']}: {d['kind']} {d['node_id']} {d['start_layer']}:{d['end_layer']} {d['quantization']} "
            f"({format_size(d['bytes'])}): {d['reason']}"
        )
    yield from _more(len(rows), "directives")


def _time(ms: float) -> str:
    return time_text(round(ms * SECOND / 1000))


def _more(count: int, what: str) -> Iterator[str]:
    if count > _MOST_ROWS:
        yield f"and {count - _MOST_ROWS:,} more {what}: see --json"
