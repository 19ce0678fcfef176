"""A station: a run of layers of one model, the sessions it holds keys and values for, and a ceiling on its memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from knotctl.core.errors import BudgetError, Conflict, UsageError, WrongIdentity, printable
from knotctl.core.kernels.decode import decode_rows
from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import RUNTIME_BYTES, MemoryPlan, Residency, plan_memory
from knotctl.core.model.config import model_config
from knotctl.core.model.forward import Pass, Rope, Rows, head
from knotctl.core.model.kv import KvCache, KvShape, KvType, kv_step
from knotctl.core.model.phases import head_phase, layer_phases, rope_factors
from knotctl.core.model.repeat import Repeater
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.arena import Arena, Floats
from knotctl.core.tensor.passing import Io, ways_of
from knotctl.core.tensor.residency import Phase, PhaseUse, Weights
from knotctl.core.wire.frame import Frame, Segment, check_finite
from knotctl.core.wire.layout import Flags, Kind

# Whose logits are wanted: the last n tokens of a segment, as (segment, n); None for every token's.
Wanted = list[tuple[int, int]] | None


def never() -> None:
    """Check nothing: for work that nobody can cancel."""


@dataclass(frozen=True, slots=True)
class StationSpec:
    """What a station is asked to be. Units: memory_budget in bytes; tokens.

    kv_tokens is what all its sessions may hold together (under a tight budget fewer, but not below least_kv_tokens),
    batch_tokens the longest batch it will be given. Without `head` others make the logits behind the last layer.
    """

    span: LayerSpan
    residency: Residency = Residency.FLUID
    memory_budget: int | None = None
    kv_tokens: int = 4096
    least_kv_tokens: int | None = None
    batch_tokens: int = 512
    logits_rows: int = 1
    runtime_bytes: int = RUNTIME_BYTES
    kv_type: KvType = KvType.F32
    io: Io = Io.AUTO
    head: bool = True


class Station:
    """Layers [A, B) of a model over a knot; the last station also has the output head.

    One thread at a time: the engine's worker, or a service's. A batch's results do not depend on its company.
    """

    def __init__(self, knot: Knot, spec: StationSpec) -> None:
        self.knot = knot
        self.span = spec.span
        self.config = config = model_config(knot.source.name, knot.header.config)
        self._layers = layer_phases(knot, config, spec.span)
        self._head = head_phase(knot, config) if spec.head and spec.span.end == config.n_layers else None
        phases = [p for layer in self._layers for p in layer.all]
        phases += [self._head] if self._head else []
        self.kv_shape = KvShape(knot.id, spec.span, config.n_kv_heads, config.head_dim, spec.kv_type)
        self.plan: MemoryPlan = plan_memory(
            config,
            phases,
            budget=spec.memory_budget,
            residency=spec.residency,
            ways=ways_of(knot.source, spec.io),
            kv_tokens=spec.kv_tokens,
            least_kv_tokens=spec.kv_tokens if spec.least_kv_tokens is None else spec.least_kv_tokens,
            kv_token_bytes=self.kv_shape.token_bytes,
            batch_tokens=spec.batch_tokens,
            logits_rows=spec.logits_rows if self._head else 0,
            runtime_bytes=spec.runtime_bytes,
        )
        self.weights = Weights(
            knot.source,
            phases,
            buffer_bytes=self.plan.buffer_bytes,
            pinned_bytes=self.plan.pinned_bytes,
            way=self.plan.way,
        )
        self._arena = Arena(self.plan.activation_bytes)
        self._repeater = Repeater(self._layers, self.weights, config.hidden_size)
        self._rope = Rope(config.inverse_frequencies(self._rope_factors()), config.interleaved_rope)
        self.sessions: dict[bytes, KvCache] = {}
        self._kv_peak = 0

    @property
    def role(self) -> str:
        """Whether the station is the `entry`, the `exit`, both (`whole`) or neither (`middle`)."""
        first, last = self.span.start == 0, self.span.end == self.config.n_layers
        return "whole" if first and last else "entry" if first else "exit" if last else "middle"

    @property
    def has_head(self) -> bool:
        """Whether logits can be asked of it."""
        return self._head is not None

    @property
    def peak_bytes(self) -> int:
        """The most that was held so far, counted as the plan counts it."""
        p, kv = self.plan, self._kv_peak
        held = self.weights.ledger.peak + p.edge_bytes + kv + self._arena.peak
        return held + p.frame_bytes + p.scratch_bytes + p.runtime_bytes

    @property
    def uses(self) -> list[PhaseUse]:
        """What each phase cost so far, in the order of the sweep."""
        return list(self.weights.uses.values())

    def _rope_factors(self) -> Floats | None:
        tensor = rope_factors(self.knot, self.config)
        if tensor is None:
            return None
        raw = self.knot.source.read(tensor.range.start, len(tensor.range))
        factors: Floats = decode_rows(tensor.qtype, raw, tensor.columns)[0]
        return factors

    def forward(self, frame: Frame, check: Callable[[], None] = never) -> Frame:
        """Return the frame's hidden states after this station's layers; from the last station logits where asked for.

        The frame's `logits` metadata says for which tokens: "last" of each segment (the default), "all", "none", or
        a list of [segment, n]: the last n tokens of that segment.
        `check` runs before each phase and may raise to abandon the batch: no session has grown then.

        Raises: WrongIdentity, UsageError, FrameError bad-activation; Conflict position-gap; BudgetError kv-full.
        """
        wanted = self._accept(frame)
        for s in frame.segments:
            self._session(s.request_id).prepare(s.position, s.n_tokens)
        self._kv_peak = max(self._kv_peak, sum(kv.nbytes for kv in self.sessions.values()))
        x = frame.payload.astype(np.float32)
        batches = list(self._chunks(frame.segments))
        self.weights.expect(self._sweep(len(batches), frame.rows, wanted))
        for batch in batches:
            rows = slice(batch[0].start, batch[-1].end)
            local = [Rows(r.kv, r.position, r.start - rows.start, r.end - rows.start) for r in batch]
            positions = np.concatenate([np.arange(r.position, r.position + r.end - r.start) for r in local])
            one = Pass(local, positions, self.config, self._rope, self._arena)
            self._repeater.forward(x[rows], one, check)
        for segment in frame.segments:
            self.sessions[segment.request_id].commit(segment.n_tokens)
        out = Frame(Kind.HIDDEN, frame.knot_id, frame.segments, x, frame.meta, frame.flags)
        if self._head is not None and wanted != []:
            out = self._logits(out, wanted)
        check_finite(out)
        return out

    def drop(self, request_id: bytes) -> bool:
        """Forget a session; returns whether it was there."""
        return self.sessions.pop(request_id, None) is not None

    def _session(self, request_id: bytes) -> KvCache:
        if request_id not in self.sessions:
            self.sessions[request_id] = KvCache(self.kv_shape, kv_step(self.plan.kv_tokens))
        return self.sessions[request_id]

    def _accept(self, frame: Frame) -> Wanted:
        if frame.knot_id.hex() != self.knot.id:
            raise WrongIdentity(
                "wrong-identity", f"frame: expected knot {self.knot.id}, found {frame.knot_id.hex()}",
                hint="the frame was made with another model file",
            )  # fmt: skip
        if frame.kind is not Kind.HIDDEN or frame.width != self.config.hidden_size:
            raise UsageError(
                "wrong-frame",
                f"frame: expected hidden states of width {self.config.hidden_size}, "
                f"found {frame.kind.name.lower()} of width {frame.width}",
                hint="partial embeddings are summed by `knotctl merge` first" if frame.kind is Kind.PARTIAL else None,
            )
        check_finite(frame)
        if len({s.request_id for s in frame.segments}) != len(frame.segments):
            raise UsageError("duplicate-segment", "frame: two segments of one request; expected one each")
        longest = max(s.position + s.n_tokens for s in frame.segments)
        if longest > self.config.context_length:
            raise UsageError(
                "context-exceeded", f"frame: position {longest}: the model's context is {self.config.context_length}"
            )
        wanted = self._wanted(frame)
        if wanted != [] and self._head is None and self.span.end == self.config.n_layers:
            raise UsageError(
                "no-head", f"frame: logits asked of layers {self.span}, which were opened without the output head",
                hint="--logits none, and ask the shards; or start the station without --head-on-shards",
            )  # fmt: skip
        for s in frame.segments:
            length = self.sessions[s.request_id].length if s.request_id in self.sessions else 0
            if s.position > length:
                raise Conflict(
                    "position-gap", f"session {s.request_id.hex()}: expected position {length} or below, "
                    f"found {s.position}", hint=f"send the tokens from position {length} on",
                )  # fmt: skip
        here = {s.request_id: s.position + s.n_tokens for s in frame.segments}
        need = sum(here.values()) + sum(kv.length for key, kv in self.sessions.items() if key not in here)
        if need > self.plan.kv_tokens:
            raise BudgetError(
                "kv-full", f"sessions: {need} tokens of keys and values asked for; room for {self.plan.kv_tokens}",
                hint="end other sessions, or give the station more memory",
            )  # fmt: skip
        return wanted

    def _chunks(self, segments: Sequence[Segment]) -> Iterator[list[Rows]]:
        """Yield the batch in pieces of at most the plan's chunk of tokens, each session's rows in order."""
        chunk: list[Rows] = []
        room, row = self.plan.chunk_tokens, 0
        for s in segments:
            kv, done = self.sessions[s.request_id], 0
            while done < s.n_tokens:
                n = min(room, s.n_tokens - done)
                chunk.append(Rows(kv, s.position + done, row, row + n))
                done, row, room = done + n, row + n, room - n
                if room == 0:
                    yield chunk
                    chunk, room = [], self.plan.chunk_tokens
        if chunk:
            yield chunk

    def _sweep(self, batches: int, rows: int, wanted: Wanted) -> Iterator[Phase]:
        """Yield the phases of a frame's pass in the order of use."""
        for _ in range(batches):
            for layer in self._layers:
                yield from layer.all
        if self._head is not None:
            rows = rows if wanted is None else sum(n for _, n in wanted)
            yield from [self._head] * -(-rows // self.plan.chunk_tokens)

    def _wanted(self, frame: Frame) -> Wanted:
        asked, segments = frame.meta.get("logits", "last"), frame.segments
        if asked == "all":
            return None
        if asked in ("last", "none"):
            return [(i, 1) for i in range(len(segments))] if asked == "last" else []
        wanted = []
        for item in asked if isinstance(asked, list) else [None]:
            match item:
                case [int(i), int(n)] if 0 <= i < len(segments) and 0 < n <= segments[i].n_tokens:
                    wanted.append((i, n))
                case _:
                    raise UsageError(
                        "usage", f"frame: logits {printable(asked)}: expected last, all, none or [segment, n] pairs"
                    )
        return wanted

    def _logits(self, hidden: Frame, wanted: Wanted) -> Frame:
        assert self._head is not None
        segments, x = hidden.segments, hidden.payload
        if wanted is not None:
            ends = list(itertools.accumulate(s.n_tokens for s in segments))
            x = np.concatenate([x[ends[i] - n : ends[i]] for i, n in wanted])
            segments = tuple(
                replace(segments[i], position=segments[i].position + segments[i].n_tokens - n, n_tokens=n)
                for i, n in wanted
            )
        out = np.empty((len(x), self.config.vocab_size), np.float32)
        for start in range(0, len(x), self.plan.chunk_tokens):
            rows = slice(start, start + self.plan.chunk_tokens)
            head(x[rows], self._head, self.weights, self.config, self._arena, out[rows])
        return Frame(Kind.LOGITS, hidden.knot_id, segments, out, {}, hidden.flags & Flags.DEGRADED)
