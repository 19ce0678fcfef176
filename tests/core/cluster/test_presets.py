"""Presets: a model by its bytes, read strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster_samples import FIXTURES, GB

from knotctl.core.cluster.presets import parse_preset, preset_of
from knotctl.core.errors import FormatError

PRESET: dict[str, Any] = {"model": "m-7B", "n_layers": 4, "bytes_per_layer": {"nf4": GB, "int8": 2 * GB}}

REFUSED = {
    "no layers": PRESET | {"n_layers": 0},
    "too many layers": PRESET | {"n_layers": 10_001},
    "layers as a float": PRESET | {"n_layers": 4.0},
    "no quantisation": PRESET | {"bytes_per_layer": {}},
    "bytes as one number": PRESET | {"bytes_per_layer": GB},
    "no bytes": PRESET | {"bytes_per_layer": {"nf4": 0}},
    "negative bytes": PRESET | {"bytes_per_layer": {"nf4": -GB}},
    "absurd bytes": PRESET | {"bytes_per_layer": {"nf4": 1 << 51}},
    "a list that is too short": PRESET | {"bytes_per_layer": {"nf4": [GB] * 3}},
    "a list with a text": PRESET | {"bytes_per_layer": {"nf4": [GB, GB, GB, "1"]}},
    "a quantisation by two names": PRESET | {"bytes_per_layer": {"bf16": GB, "bfloat16": GB}},
    "a head for some quantisations": PRESET | {"head_bytes": {"nf4": GB}},
    "a negative head": PRESET | {"head_bytes": -1},
    "a field misspelt": PRESET | {"byte_per_layer": {}},
    "no name": {k: v for k, v in PRESET.items() if k != "model"},
    "a name with an escape": PRESET | {"model": "\x1b[31m"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_broken_presets_are_refused(name: str) -> None:
    with pytest.raises(FormatError) as e:
        parse_preset(json.dumps(REFUSED[name]).encode(), "p.json")
    assert e.value.code == "bad-preset"
    assert e.value.message.startswith("p.json: ") and "\x1b" not in e.value.message


def test_one_number_a_list_or_an_object_each() -> None:
    layers = [GB, 2 * GB, GB, GB]
    model = preset_of(
        PRESET | {"bytes_per_layer": {"nf4": layers}, "embedding_bytes": 5, "head_bytes": {"nf4": 7}}, "p"
    )
    sizes = model.sizes_at("nf4")
    assert sizes is not None and model.sizes_at("int8") is None
    assert [sizes.span_bytes(k, k + 1) for k in range(4)] == [GB + 5, 2 * GB, GB, GB + 7]
    assert sizes.total == 5 * GB + 12


def test_parameters_are_stated_or_in_the_name_or_reckoned_from_the_bytes() -> None:
    assert preset_of(PRESET | {"parameters": 5}, "p").parameters == 5
    assert preset_of(PRESET, "p").parameters == 7 * GB
    assert preset_of(PRESET | {"model": "m", "bytes_per_layer": {"int8": GB}}, "p").parameters == 4 * GB


def test_the_records_model() -> None:
    model = parse_preset((FIXTURES / "llama-700b.json").read_bytes())
    sizes = model.sizes_at("nf4")
    assert sizes is not None and sizes.total == 350 * GB
