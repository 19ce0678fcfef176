"""The memory plan of a station: every byte it may use, counted before any is allocated.

A budget covers weights held, keys and values, activations, logits and the kernels' scratch. From it follow what stays
in memory, the size of a row tile and the length of a prefill chunk; a budget that cannot work is refused with the
table that shows why (DESIGN decision 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from knotctl.core.errors import BudgetError, UsageError
from knotctl.core.kernels.attention import attention_scratch_bytes
from knotctl.core.kernels.quantize import activation_kind, quantized_bytes
from knotctl.core.kernels.threads import get_threads
from knotctl.core.model.config import ModelConfig
from knotctl.core.sizes import format_size
from knotctl.core.tensor.arena import ALIGN
from knotctl.core.tensor.passing import EDGES_BYTES, Way
from knotctl.core.tensor.residency import Phase
from knotctl.core.tensor.views import TensorView

# Weights are read once a chunk, so a chunk this long makes prefill bound by arithmetic; longer ones only cost memory.
MAX_CHUNK = 512
# A tile this large is read and multiplied as fast as a whole phase; below it, a shorter chunk is the better trade.
GOOD_TILE_BYTES = 4 << 20
# The least that is worth reading ahead at a time: a request to a store takes some 10 ms before its first byte, and this
# many bytes take that long at 6 Gbit/s.
AHEAD_TILE_BYTES = 8 << 20
# What this process takes beside `import numba` before it holds a single weight: the kernels' machine code and what
# compiled it, our modules, a frame's bytes while they are parsed. Measured: 31 to 34 MiB.
RUNTIME_BYTES = 36 << 20
# Sessions of a pass that repeat.py records; of more, the arithmetic takes far longer than asking for it.
REPEATED_ROWS = 16
# Below this many tokens a chunk, reading the weights again for each one costs more than multiplying with them.
GOOD_CHUNK = 64
# What a thread of the kernels may take beside attention's scores: a tile's unpacked blocks and float sums.
MATMUL_SCRATCH = 128 << 10


class Residency(StrEnum):
    """What stays in memory: a phase at a time, a fixed part, everything, or whatever the budget allows."""

    FLUID = "fluid"
    PINNED = "pinned"
    RESIDENT = "resident"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of each use, and what follows. budget_bytes is None where no ceiling was given.

    Units: bytes; chunk_tokens and kv_tokens in tokens. What passes through does so `way`, at most buffer_bytes a load.
    """

    budget_bytes: int | None
    residency: Residency
    way: Way
    weight_bytes: int
    buffer_bytes: int
    pinned_bytes: int
    kv_tokens: int
    kv_bytes: int
    chunk_tokens: int
    activation_bytes: int
    frame_bytes: int
    scratch_bytes: int
    runtime_bytes: int

    @property
    def passing_bytes(self) -> int:
        """The most that is held at any moment of weights that pass through."""
        return self.buffer_bytes * (2 if self.way is Way.READ_AHEAD else 1)

    @property
    def edge_bytes(self) -> int:
        """The most of the knot's pages that are resident beside those weights."""
        return EDGES_BYTES if self.way is Way.MAP and self.buffer_bytes else 0

    @property
    def total_bytes(self) -> int:
        """The most that is held at any moment."""
        held = self.passing_bytes + self.edge_bytes + self.pinned_bytes
        return held + self.kv_bytes + self.activation_bytes + self.frame_bytes + self.scratch_bytes + self.runtime_bytes

    def table(self) -> list[tuple[str, int]]:
        """Return the uses and their bytes, for people."""
        return [
            ("weights pinned", self.pinned_bytes),
            ("weights passing through", self.passing_bytes + self.edge_bytes),
            (f"keys and values of {self.kv_tokens} tokens", self.kv_bytes),
            (f"activations of {self.chunk_tokens} tokens", self.activation_bytes),
            ("frames in and out", self.frame_bytes),
            ("kernel scratch", self.scratch_bytes),
            ("program and kernels", self.runtime_bytes),
        ]


def activation_bytes(config: ModelConfig, phases: Sequence[Phase], tokens: int) -> int:
    """Return the bytes of the arena that a chunk of so many tokens needs in its hungriest phase.

    It counts what forward.py cuts: float32 arrays, and the quantised copy of each input for each kind of weight.
    """
    hidden, ffn, q, kv = config.hidden_size, config.ffn_size, config.q_size, config.kv_size
    # each array may be followed by less than ALIGN bytes; no phase cuts more than this many
    slack = 24 * ALIGN

    def floats(*widths: int) -> int:
        return 4 * tokens * sum(widths)

    def quantised(columns: int, tensors: Iterable[TensorView]) -> int:
        kinds = {activation_kind(t.qtype): t.qtype for t in tensors}
        return sum(quantized_bytes(qtype, columns, tokens) for qtype in kinds.values())

    most = 0
    ffn_inputs: dict[int | None, list[TensorView]] = {}
    for phase in phases:
        t = phase.tensors
        if phase.name == "attn":
            inputs = [v for role, v in t.items() if role in ("attn_q_weight", "attn_k_weight", "attn_v_weight")]
            normed = (q if "attn_q_norm_weight" in t else 0) + (kv if "attn_k_norm_weight" in t else 0)
            need = floats(hidden, q, kv, kv, normed, q, hidden)
            need += quantised(hidden, inputs) + quantised(q, [t["attn_output_weight"]])
        elif phase.name == "output":
            need = floats(hidden) + quantised(hidden, [t["output_weight"]])
        else:
            mine = ffn_inputs.setdefault(phase.layer, [])
            mine += [v for role, v in t.items() if role in ("ffn_gate_weight", "ffn_up_weight")]
            need = floats(hidden, ffn, ffn, hidden) + quantised(hidden, mine)
            need += quantised(ffn, [v for role, v in t.items() if role == "ffn_down_weight"])
        most = max(most, need)
    return most + slack


def scratch_bytes(config: ModelConfig, kv_tokens: int) -> int:
    """Return the bytes that the kernels' threads need beside the arena: attention's scores, tiles, and a margin."""
    scores = attention_scratch_bytes(config.n_heads, config.n_kv_heads, config.head_dim, kv_tokens, 4)
    return get_threads() * (scores + MATMUL_SCRATCH)


def plan_memory(
    config: ModelConfig,
    phases: Sequence[Phase],
    *,
    budget: int | None,
    residency: Residency,
    ways: Sequence[Way],
    kv_tokens: int,
    least_kv_tokens: int,
    kv_token_bytes: int,
    batch_tokens: int,
    logits_rows: int,
    runtime_bytes: int,
) -> MemoryPlan:
    """Return the plan for a station of these phases.

    batch_tokens is the longest batch that will be asked for. Keys and values get room for kv_tokens, fewer under a
    budget that has no room for them, but no fewer than least_kv_tokens. Of the ways that what does not stay may pass
    through, the first one that there is room for is taken.

    Raises: BudgetError budget-too-small with the table; UsageError where pinned is asked for without a budget.
    """
    total = sum(p.pinned_bytes for p in phases)
    # The head is always tiled (the 7B's alone is 426 MiB): the largest phase of a layer is the natural tile.
    largest = max((p.bytes for p in phases if p.layer is not None), default=GOOD_TILE_BYTES)
    smallest_tile = max(p.smallest_tile for p in phases)
    buffer = max(largest, smallest_tile)
    # hidden states as they came, as they leave, and where repeated passes find them
    frames = (2 * batch_tokens + REPEATED_ROWS) * config.hidden_size * 4 + logits_rows * config.vocab_size * 4

    def plan(mode: Residency, buffer_bytes: int, pinned: int, kv: int, chunk: int, *, way: Way = ways[0]) -> MemoryPlan:
        activations = activation_bytes(config, phases, chunk)
        scratch = scratch_bytes(config, kv)
        return MemoryPlan(
            budget,
            mode,
            way,
            sum(p.bytes for p in phases),
            buffer_bytes,
            pinned,
            kv,
            kv * kv_token_bytes,
            chunk,
            activations,
            frames,
            scratch,
            runtime_bytes,
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
        room = budget - plan(residency, 0, 0, kv, chunk).total_bytes
        if residency in (Residency.RESIDENT, Residency.AUTO) and room >= total:
            return plan(Residency.RESIDENT, 0, total, kv, chunk)
        for way in ways if residency is not Residency.RESIDENT else ():
            left = room - (EDGES_BYTES if way is Way.MAP else 0)
            pins = residency is not Residency.FLUID
            if left < tile or (way is Way.READ_AHEAD and not _two_pay(left, buffer, total, pins=pins)):
                continue
            buffers = 2 if way is Way.READ_AHEAD else 1
            pinned = max(0, left - buffers * buffer) if pins else 0
            mode = Residency.PINNED if pinned else Residency.FLUID
            return plan(mode, min(buffer, left // buffers), pinned, kv, chunk, way=way)
    resident = residency is Residency.RESIDENT
    least = (Residency.RESIDENT, 0, total) if resident else (Residency.FLUID, smallest_tile, 0)
    raise _too_small(budget, plan(*least, least_kv_tokens, 1, way=ways[-1]))


def _two_pay(room: int, buffer: int, total: int, *, pins: bool) -> bool:
    """Return whether the room is better used for two buffers of up to `buffer` than for one, and more that is pinned.

    With one a sweep takes compute + s/rate, s being what streams; with two max(compute, (s + buffer)/rate), as the
    second buffer's place is not pinned. How compute compares with the rate depends on the store and on the batch: a
    prompt's chunk computes for seconds, a token for less than a buffer takes to come. At worst two cost (s + b)/s of
    what one does, and one costs (2s + b)/(s + b) of what two do: the same at s = 1.62 b. So two from 2 b on, where they
    may save almost half and cost at most half as much again, less the more there is to stream.
    """
    if room // 2 < min(buffer, AHEAD_TILE_BYTES):
        return False
    return not pins or total - max(0, room - buffer) >= 2 * buffer


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
