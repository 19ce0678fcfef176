"""Nodes from outside: what is broken is refused with its place, its almost-same twin is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster_samples import GB, a_model

from knotctl.core.cluster.nodes import MAX_NODES, parse_nodes
from knotctl.core.errors import FormatError
from knotctl.core.spans import LayerSpan

NODE: dict[str, Any] = {
    "node_id": "a", "vram_bytes": 8 * GB, "quantizations": ["nf4", "int8"],
    "benchmark_tokens_per_sec": 12.4, "benchmark_model": "meta-llama/Llama-3-8B",
}  # fmt: skip
HELD = {"start_layer": 0, "end_layer": 4, "quantization": "nf4"}
MODEL = a_model(10)


def parsed(*nodes: Any) -> Any:
    return parse_nodes(json.dumps(nodes).encode(), MODEL, "nodes.json")


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": (7, "bad-node"),
    "no id": ({k: v for k, v in NODE.items() if k != "node_id"}, "bad-node"),
    "empty id": (NODE | {"node_id": ""}, "bad-node"),
    "id of 129 characters": (NODE | {"node_id": "a" * 129}, "bad-node"),
    "id with an escape": (NODE | {"node_id": "a\x1b[31m"}, "bad-node"),
    "id with a space": (NODE | {"node_id": "a b"}, "bad-node"),
    "id that is a number": (NODE | {"node_id": 7}, "bad-node"),
    "no memory": (NODE | {"vram_bytes": 0}, "bad-node"),
    "negative memory": (NODE | {"vram_bytes": -1}, "bad-node"),
    "absurd memory": (NODE | {"vram_bytes": 1 << 51}, "bad-node"),
    "memory as a float": (NODE | {"vram_bytes": 8e9}, "bad-node"),
    "memory as a text": (NODE | {"vram_bytes": "8GB"}, "bad-node"),
    "memory true": (NODE | {"vram_bytes": True}, "bad-node"),
    "memory null": (NODE | {"vram_bytes": None}, "bad-node"),
    "speed zero": (NODE | {"benchmark_tokens_per_sec": 0}, "bad-node"),
    "speed negative": (NODE | {"benchmark_tokens_per_sec": -3.0}, "bad-node"),
    "speed absurd": (NODE | {"benchmark_tokens_per_sec": 1e7}, "bad-node"),
    "speed true": (NODE | {"benchmark_tokens_per_sec": True}, "bad-node"),
    "no quantisations": (NODE | {"quantizations": []}, "bad-node"),
    "a quantisation twice": (NODE | {"quantizations": ["bf16", "bfloat16"]}, "bad-node"),
    "an unknown quantisation": (NODE | {"quantizations": ["nf4", "q7"]}, "unknown-quantization"),
    "a quantisation that is no text": (NODE | {"quantizations": [4]}, "unknown-quantization"),
    "quantisations as one text": (NODE | {"quantizations": "nf4"}, "bad-node"),
    "a field misspelt": (NODE | {"curent": []}, "bad-node"),
    "current beyond the model": (NODE | {"current": [HELD | {"end_layer": 11}]}, "bad-node"),
    "current reversed": (NODE | {"current": [HELD | {"start_layer": 4}]}, "bad-node"),
    "current at an unknown quantisation": (NODE | {"current": [HELD | {"quantization": "q7"}]}, "unknown-quantization"),
    "current at one the model has not": (NODE | {"current": [HELD | {"quantization": "fp8"}]}, "bad-node"),
    "current twice the same layers": (NODE | {"current": [HELD, HELD]}, "bad-node"),
    "another model's layers without their bytes": (NODE | {"current": [HELD | {"model": "other"}]}, "bad-node"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_broken_registrations_are_refused(name: str) -> None:
    document, code = REFUSED[name]
    with pytest.raises(FormatError) as e:
        parsed(NODE | {"node_id": "good"}, document)
    assert e.value.code == code
    assert e.value.message.startswith("nodes.json: node 1")
    assert "\x1b" not in e.value.message
    assert e.value.exit_code == 3 and e.value.http_status == 400


ACCEPTED: dict[str, Any] = {
    "the contract's": NODE,
    "id of 128 characters": NODE | {"node_id": "a" * 128},
    "one byte of memory": NODE | {"vram_bytes": 1},
    "a whole speed": NODE | {"benchmark_tokens_per_sec": 12},
    "no benchmark model": NODE | {"benchmark_model": None},
    "other spellings": NODE | {"quantizations": ["BF16", "Q4_K_M", "Int8"]},
    "holding all": NODE | {"current": [HELD | {"end_layer": 10}]},
    "holding a plan's assignment as printed": NODE
    | {"current": [HELD | {"node_id": "a", "is_head": True, "weight_bytes": 4 * GB, "reason": "…"}]},
    "holding another model": NODE | {"current": [HELD | {"model": "other", "weight_bytes": GB, "end_layer": 99}]},
    "holding two runs": NODE | {"current": [HELD, HELD | {"start_layer": 6, "end_layer": 8}]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_their_valid_twins_are_taken(name: str) -> None:
    assert parsed(ACCEPTED[name])[0].vram_bytes > 0


def test_what_a_node_holds_is_read() -> None:
    (node,) = parsed(NODE | {"current": [HELD]})
    assert node.current[0].span == LayerSpan(0, 4)
    assert node.quantizations == ("nf4", "int8")


def test_ids_must_differ() -> None:
    with pytest.raises(FormatError) as e:
        parsed(NODE, NODE | {"vram_bytes": 9})
    assert e.value.code == "duplicate-node"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad-json"),
        (b'[{"node_id": "a", "node_id": "b"}]', "duplicate-key"),
        (b'[{"vram_bytes": NaN}]', "bad-json"),
        (b'[{"vram_bytes": 1e400}]', "bad-json"),
        (b"[" * 100_000, "bad-json"),
        (b'"nodes"', "bad-nodes"),
        (b'{"nodes": 7}', "bad-nodes"),
        (b'{"nodes": [], "more": 1}', "bad-nodes"),
        (b"[" + b"7," * MAX_NODES + b"7]", "bad-nodes"),
    ],
    ids=["empty", "key twice", "NaN", "overflow", "deep", "text", "nodes no list", "unknown field", "100 001 nodes"],
)
def test_broken_files_are_refused(data: bytes, code: str) -> None:
    with pytest.raises(FormatError) as e:
        parse_nodes(data, MODEL)
    assert e.value.code == code


def test_no_node_is_a_valid_file_and_order_does_not_matter() -> None:
    assert parse_nodes(b"[]", MODEL) == parse_nodes(b'{"nodes": []}', MODEL) == ()
    b = NODE | {"node_id": "b"}
    assert parsed(NODE, b) == parsed(b, NODE)
