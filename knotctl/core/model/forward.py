"""The forward pass of a span of layers: load a phase, compute it, evict it.

Source: Llama (Touvron et al. 2023) and Qwen2 (Yang et al. 2024): pre-norm attention with rope and grouped KV heads,
then a gated feed-forward; seed 000 section 2 for the phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from knotctl.core.kernels.attention import attention
from knotctl.core.kernels.elementwise import add, add_bias, swiglu
from knotctl.core.kernels.norm import rms_norm
from knotctl.core.kernels.rope import rope
from knotctl.core.model.config import ModelConfig
from knotctl.core.model.kv import KvCache
from knotctl.core.model.phases import LayerPhases
from knotctl.core.tensor.arena import Arena, Floats
from knotctl.core.tensor.residency import HeldPhase, Input, Phase, Weights


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, end) of a batch: consecutive tokens of one session, the first one at `position`."""

    kv: KvCache
    position: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rope:
    """The rope of a model. Shapes: inverse_frequencies float32 [rope_dim / 2]."""

    inverse_frequencies: Floats
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """What every layer of a pass computes with. Shapes: positions int64 [tokens], of the batch's rows in order."""

    batch: Sequence[Rows]
    positions: npt.NDArray[np.int64]
    config: ModelConfig
    rope: Rope
    arena: Arena

    @property
    def tokens(self) -> int:
        """The number of rows."""
        return len(self.positions)


def forward(x: Floats, p: Pass, layers: Iterable[LayerPhases], weights: Weights, check: Callable[[], None]) -> None:
    """Run x float32 [tokens, hidden_size] through the layers, in place; `check` runs before each phase and may raise.

    Each session's KV grows by its rows; the caller has truncated it to the rows' position beforehand. Everything but
    x is cut from the arena, whose size budget.py counts: the two change together. All arithmetic is launches of
    kernels, so that repeat.py can record them.
    """
    for layer in layers:
        check()
        with p.arena.scope(), weights.hold(layer.attn) as w:
            add(x, attend(w, x, p, layer.index))
        with p.arena.scope():
            check()
            with weights.hold(layer.ffn_gate) as w:
                normed = Input(norm(x, w.vector("ffn_norm_weight"), p), p.arena)
                gate = w.multiply("ffn_gate_weight", normed, p.arena.floats(p.tokens, p.config.ffn_size))
            check()
            with weights.hold(layer.ffn_up) as w:
                up = w.multiply("ffn_up_weight", normed, p.arena.floats(p.tokens, p.config.ffn_size))
            check()
            with weights.hold(layer.ffn_down) as w:
                swiglu(gate, up, gate)
                add(x, w.multiply("ffn_down_weight", Input(gate, p.arena), p.arena.floats(*x.shape)))


def attend(w: HeldPhase, x: Floats, p: Pass, layer: int) -> Floats:
    """Return what attention of one layer adds to x; the layer's keys and values of these rows enter the KV caches."""
    c = p.config
    normed = Input(norm(x, w.vector("attn_norm_weight"), p), p.arena)
    q, k, v = (project(w, part, normed, heads, p) for part, heads in
               (("attn_q", c.n_heads), ("attn_k", c.n_kv_heads), ("attn_v", c.n_kv_heads)))  # fmt: skip
    for turned in (q, k):
        rope(turned, p.positions, p.rope.inverse_frequencies, p.rope.interleaved)
    mixed = p.arena.floats(p.tokens, c.q_size)
    for r in p.batch:
        rows = slice(r.start, r.end)
        keys, values = r.kv.store(layer, p.positions[rows], k[rows], v[rows])
        attention(q[rows], keys, values, p.positions[rows], mixed[rows].reshape(-1, *q.shape[1:]))
    out = w.multiply("attn_output_weight", Input(mixed, p.arena), p.arena.floats(p.tokens, c.hidden_size))
    if "attn_output_bias" in w:
        add_bias(out, w.vector("attn_output_bias"))
    return out


def project(w: HeldPhase, part: str, normed: Input, n_heads: int, p: Pass) -> Floats:
    """Return queries, keys or values float32 [tokens, heads, head_dim], biased and normed where the model asks it."""
    out = w.multiply(f"{part}_weight", normed, p.arena.floats(p.tokens, n_heads * p.config.head_dim))
    if f"{part}_bias" in w:
        add_bias(out, w.vector(f"{part}_bias"))
    if f"{part}_norm_weight" in w:
        out = norm(out.reshape(-1, p.config.head_dim), w.vector(f"{part}_norm_weight"), p)
    return out.reshape(p.tokens, n_heads, p.config.head_dim)


def head(x: Floats, phase: Phase, weights: Weights, config: ModelConfig, arena: Arena, out: Floats) -> None:
    """Write the logits of hidden states to out float32 [tokens, vocab_size]; rows of padding get none."""
    with arena.scope(), weights.hold(phase) as w:
        normed = arena.floats(*x.shape)
        rms_norm(x, w.vector("output_norm_weight"), config.rms_eps, normed)
        w.multiply("output_weight", Input(normed, arena), out)


def norm(x: Floats, weight: Floats, p: Pass) -> Floats:
    """Return x divided by its root mean square, row by row, times weight."""
    out = p.arena.floats(*x.shape)
    rms_norm(x, weight, p.config.rms_eps, out)
    return out
