"""The memory plan of a station: every byte it may use, counted before any is allocated.

A budget covers weights held, keys and values, activations, logits and the kernels' scratch. From it follow what stays
in memory, the size of a row tile and the length of a prefill chunk; a budget that cannot work is refused with the
table that shows why (DESIGN decision 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from knotctl.core.errors import BudgetError, UsageError
from knotctl.core.model.config import ModelConfig
from knotctl.core.sizes import format_size
from knotctl.core.tensor.residency import Phase

# Weights are read once a chunk, so a chunk this long makes prefill bound by arithmetic; longer ones only cost memory.
MAX_CHUNK = 512
# A tile this large is read and multiplied as fast as a whole phase; below it, a shorter chunk is the better trade.
GOOD_TILE_BYTES = 4 << 20
# Below this many tokens a chunk, reading the weights again for each one costs more than multiplying with them.
GOOD_CHUNK = 64
# Kernel scratch: unpacked tiles and float sums of two threads, measured well below this.
SCRATCH_BYTES = 2 << 20


class Residency(StrEnum):
    """What stays in memory: a phase at a time, a fixed part, everything, or whatever the budget allows."""

    FLUID = "fluid"
    PINNED = "pinned"
    RESIDENT = "resident"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of each use, and what follows. budget_bytes is None where no ceiling was given.

    Units: bytes; chunk_tokens and kv_tokens in tokens.
    """

    budget_bytes: int | None
    residency: Residency
    weight_bytes: int
    buffer_bytes: int
    pinned_bytes: int
    kv_tokens: int
    kv_bytes: int
    chunk_tokens: int
    activation_bytes: int
    frame_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most that is held at any moment."""
        held = self.buffer_bytes + self.pinned_bytes
        return held + self.kv_bytes + self.activation_bytes + self.frame_bytes + SCRATCH_BYTES

    def table(self) -> list[tuple[str, int]]:
        """Return the uses and their bytes, for people."""
        return [
            ("weights pinned", self.pinned_bytes),
            ("weights passing through", self.buffer_bytes),
            (f"keys and values of {self.kv_tokens} tokens", self.kv_bytes),
            (f"activations of {self.chunk_tokens} tokens", self.activation_bytes),
            ("frames in and out", self.frame_bytes),
            ("kernel scratch", SCRATCH_BYTES),
        ]


def activation_bytes(config: ModelConfig) -> int:
    """Return the bytes of activations that one token needs at the most in any phase."""
    hidden, ffn, q, kv = config.hidden_size, config.ffn_size, config.q_size, config.kv_size
    # float32 arrays alive at once, and the int8 copies with their scales and sums (2 bytes a value is above all kinds)
    attn = 4 * (3 * hidden + 2 * q + 4 * kv) + 2 * (hidden + q)
    feed_forward = 4 * (3 * hidden + 2 * ffn) + 2 * (hidden + ffn)
    return max(attn, feed_forward)


def plan_memory(
    config: ModelConfig,
    phases: Sequence[Phase],
    *,
    budget: int | None,
    residency: Residency,
    kv_tokens: int,
    least_kv_tokens: int,
    kv_token_bytes: int,
    batch_tokens: int,
    logits_rows: int,
) -> MemoryPlan:
    """Return the plan for a station of these phases.

    batch_tokens is the longest batch that will be asked for. Keys and values get room for kv_tokens, fewer under a
    budget that has no room for them, but no fewer than least_kv_tokens.

    Raises: BudgetError budget-too-small with the table; UsageError where pinned is asked for without a budget.
    """
    total = sum(p.bytes for p in phases)
    # The head is always tiled (the 7B's alone is 426 MiB): the largest phase of a layer is the natural tile.
    largest = max((p.bytes for p in phases if p.layer is not None), default=GOOD_TILE_BYTES)
    smallest_tile = max(p.smallest_tile for p in phases)
    buffer = max(largest, smallest_tile)
    # hidden states as they came and as they leave
    frames = 2 * batch_tokens * config.hidden_size * 4 + logits_rows * config.vocab_size * 4
    token_bytes = activation_bytes(config)

    def plan(mode: Residency, buffer_bytes: int, pinned: int, kv: int, chunk: int) -> MemoryPlan:
        return MemoryPlan(
            budget, mode, total, buffer_bytes, pinned, kv, kv * kv_token_bytes, chunk, chunk * token_bytes, frames
        )

    longest = max(1, min(MAX_CHUNK, batch_tokens))
    if budget is None:
        if residency is Residency.PINNED:
            raise UsageError("usage", "--residency pinned: needs --memory-budget, which says how much may be pinned")
        keep = residency is Residency.RESIDENT or (
            residency is Residency.AUTO and total + kv_tokens * kv_token_bytes <= available_memory() // 2
        )
        if keep:
            return plan(Residency.RESIDENT, 0, total, kv_tokens, longest)
        return plan(Residency.FLUID, buffer, 0, kv_tokens, longest)
    # Long contexts are given up before good tiles and chunks, those before the least context.
    contexts = [kv_tokens >> i for i in range(32) if kv_tokens >> i > least_kv_tokens] + [least_kv_tokens]
    chunks = [longest >> i for i in range(longest.bit_length())]
    good = min(buffer, max(smallest_tile, GOOD_TILE_BYTES))
    tries = [(kv, chunk, good) for kv in contexts for chunk in chunks if chunk >= min(longest, GOOD_CHUNK)]
    tries += [(least_kv_tokens, chunk, tile) for tile in (good, smallest_tile) for chunk in chunks]
    for kv, chunk, tile in tries:
        room = budget - SCRATCH_BYTES - frames - kv * kv_token_bytes - chunk * token_bytes
        if residency in (Residency.RESIDENT, Residency.AUTO) and room >= total:
            return plan(Residency.RESIDENT, 0, total, kv, chunk)
        if residency is not Residency.RESIDENT and room >= tile:
            pinned = max(0, room - buffer) if residency is not Residency.FLUID else 0
            return plan(Residency.PINNED if pinned else Residency.FLUID, min(buffer, room), pinned, kv, chunk)
    resident = residency is Residency.RESIDENT
    least = (Residency.RESIDENT, 0, total) if resident else (Residency.FLUID, smallest_tile, 0)
    raise _too_small(budget, plan(*least, least_kv_tokens, 1))


def _too_small(budget: int, least: MemoryPlan) -> BudgetError:
    lines = "\n".join(f"  {what:<36}{format_size(count):>12}" for what, count in least.table())
    return BudgetError(
        "budget-too-small",
        f"memory budget {format_size(budget)}: the least that works is {format_size(least.total_bytes)}:\n{lines}",
        hint="raise --memory-budget, shorten the context, or give this station fewer layers",
    )


def available_memory() -> int:
    """Return the bytes of memory that the system could give out now (Linux's own estimate), or 0 where it says none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
