"""What a worker needs beside weights, keys and values: its frames, and what is computed of them at a time.

A worker does not know its layers yet, so it counts as if it had all of them; long frames are given up before layers.
"""

from __future__ import annotations

from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import GOOD_CHUNK, activation_bytes, scratch_bytes
from knotctl.core.model.config import model_config
from knotctl.core.model.phases import head_phase, layer_phases
from knotctl.core.spans import LayerSpan

# No more of its memory than this goes to frames, where they need not be so long.
_SHARE = 16
# Passes that streams share are a chunk of prompt, and beside it a token and a draft of each.
_LEAST = 2 * GOOD_CHUNK


def frame_room(knot: Knot, room: int, most: int, logits_rows: int, kv_tokens: int) -> tuple[int, int]:
    """Return the tokens of the longest frame that a worker should take, and the bytes that it then needs.

    most is the longest that is wanted; with little room it is less, but not less than passes need.
    Units: room and what is returned second in bytes; kv_tokens, the longest that a session may be, in tokens.
    """
    config = model_config(knot.source.name, knot.header.config)
    layers = layer_phases(knot, config, LayerSpan(0, config.n_layers))
    phases = [*(p for layer in layers for p in layer.all), head_phase(knot, config)]

    def need(tokens: int) -> int:
        frames = 2 * tokens * config.hidden_size * 4 + logits_rows * config.vocab_size * 4
        return activation_bytes(config, phases, tokens) + frames + scratch_bytes(config, kv_tokens)

    tokens = most
    while tokens > _LEAST and need(tokens) > room // _SHARE:
        tokens = max(_LEAST, tokens // 2)
    return tokens, need(tokens)
