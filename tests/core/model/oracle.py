"""The forward pass once more, in plain float32 numpy over dequantised weights: what the engine must come close to."""

from __future__ import annotations

import numpy as np

from knotctl.core.kernels.decode import decode_rows
from knotctl.core.knot.reader import Knot
from knotctl.core.model.config import ModelConfig, model_config


def forward(knot: Knot, tokens: list[int]) -> np.ndarray:
    """Logits float32 [tokens, vocab_size] of a prompt."""
    c = model_config("oracle", knot.header.config)

    def tensor(name: str) -> np.ndarray:
        entry = knot.entry(name)
        raw = np.frombuffer(knot.read(name), np.uint8)
        return decode_rows(entry.qtype, raw, entry.shape[-1]).reshape(entry.shape)

    x = tensor("token_embd_weight")[tokens]
    factors = tensor("rope_freqs_weight") if knot.has("rope_freqs_weight") else None
    for layer in range(c.n_layers):
        blk = f"blk_{layer}_"
        x = x + attend(c, lambda part, b=blk: tensor(b + part), lambda part, b=blk: knot.has(b + part), x, factors)
        h = rms(x, tensor(f"blk_{layer}_ffn_norm_weight"), c)
        gate, up = (h @ tensor(f"blk_{layer}_ffn_{p}_weight").T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensor(f"blk_{layer}_ffn_down_weight").T
    head = "token_embd_weight" if c.tied_embedding else "output_weight"
    return (rms(x, tensor("output_norm_weight"), c) @ tensor(head).T)[:, : c.vocab_size]


def attend(c: ModelConfig, tensor, has, x: np.ndarray, factors: np.ndarray | None) -> np.ndarray:  # type: ignore[no-untyped-def]
    h = rms(x, tensor("attn_norm_weight"), c)
    heads = {}
    for p in "qkv":
        y = h @ tensor(f"attn_{p}_weight").T
        if has(f"attn_{p}_bias"):
            y = y + tensor(f"attn_{p}_bias")
        y = y.reshape(len(x), -1, c.head_dim)
        if has(f"attn_{p}_norm_weight"):
            y = rms(y, tensor(f"attn_{p}_norm_weight"), c)
        heads[p] = y if p == "v" else turned(c, y, factors)
    group = c.n_heads // c.n_kv_heads
    k, v = (np.repeat(heads[p], group, axis=1) for p in "kv")
    scores = np.einsum("thd,shd->hts", heads["q"], k) / np.sqrt(c.head_dim)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1) @ tensor("attn_output_weight").T
    return out + tensor("attn_output_bias") if has("attn_output_bias") else out


def turned(c: ModelConfig, y: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    d = c.rope_dim
    frequencies = c.rope_theta ** (-np.arange(0, d, 2) / d) / (1 if factors is None else factors)
    angle = np.arange(len(y))[:, None] * frequencies
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = y.copy()
    if c.interleaved_rope:
        a, b = y[..., 0:d:2], y[..., 1:d:2]
        out[..., 0:d:2], out[..., 1:d:2] = a * cos - b * sin, a * sin + b * cos
    else:
        a, b = y[..., : d // 2], y[..., d // 2 : d]
        out[..., : d // 2], out[..., d // 2 : d] = a * cos - b * sin, a * sin + b * cos
    return out


def rms(x: np.ndarray, weight: np.ndarray, c: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + c.rms_eps) * weight
