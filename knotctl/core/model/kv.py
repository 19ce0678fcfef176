"""The keys and values of one session over one span of layers, in memory and as a file between two shell calls.

The file (man knotctl-run-station, FILES): "KNKV", u32 JSON length, JSON, then keys and values, each
[layers, kv heads, tokens, head_dim] of float32 or float16, then their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from knotctl.core.atomic import write_whole
from knotctl.core.errors import FormatError, SourceError, WrongIdentity, printable
from knotctl.core.kernels.addresses import address
from knotctl.core.kernels.kv import store
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.arena import Floats

MAGIC = b"KNKV"
META_CAP = 4096


class KvType(StrEnum):
    """How a key or value is held: as it was computed, or rounded to half the bytes."""

    F32 = "f32"
    F16 = "f16"

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is KvType.F32 else 2


_DTYPES = {KvType.F32: np.float32, KvType.F16: np.float16}
# float32 or float16, by the type of the cache
KvArray = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a session's cache is of: model, layers, and the sizes of a token's keys in a layer."""

    knot_id: str
    span: LayerSpan
    n_kv_heads: int
    head_dim: int
    kind: KvType

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over the whole span."""
        return 2 * len(self.span) * self.n_kv_heads * self.head_dim * self.kind.item_bytes


def kv_step(limit: int) -> int:
    """Return the tokens by which sessions that may hold `limit` tokens together make room.

    Doubling would hold up to twice what the budget counted; a copy every 256 tokens costs less than a token's weights.
    """
    return max(1, min(256, limit // 32))


class KvCache:
    """Keys and values of tokens [0, length) of one session, for the layers of one span."""

    def __init__(self, shape: KvShape, step: int = 1) -> None:
        self.shape = shape
        self._step = step
        self.length = 0
        self._data = self._allocate(0)

    @property
    def capacity(self) -> int:
        """Tokens there is room for without growing."""
        return int(self._data.shape[3])

    @property
    def place(self) -> tuple[int, int]:
        """Where the cache lies in memory and how it is laid out: the same while it does not grow."""
        return address(self._data), self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._data.nbytes

    def _allocate(self, tokens: int) -> KvArray:
        s = self.shape
        return np.empty((2, len(s.span), s.n_kv_heads, tokens, s.head_dim), _DTYPES[s.kind])

    def prepare(self, position: int, count: int) -> None:
        """Make ready for tokens [position, position + count): forget what lies beyond position, make room.

        The caller has checked that every token before position is here.
        """
        self.length = position
        if position + count > self.capacity:
            grown = self._allocate(-(-(position + count) // self._step) * self._step)
            grown[:, :, :, :position] = self._data[:, :, :, :position]
            self._data = grown

    def store(self, layer: int, positions: npt.NDArray[np.int64], k: Floats, v: Floats) -> tuple[KvArray, KvArray]:
        """Put keys and values [tokens, kv heads, head_dim] at their positions; return all of the layer's.

        Shapes: both returned [kv heads, capacity, head_dim].
        """
        keys, values = self._data[:, layer - self.shape.span.start]
        store(k, positions, keys)
        store(v, positions, values)
        return keys, values

    def commit(self, count: int) -> None:
        """Note that every layer of the span has stored so many more tokens."""
        self.length += count

    def save(self, path: Path) -> None:
        """Write the cache to a file, whole or not at all."""
        meta = json.dumps(_identity(self.shape) | {"length": self.length}).encode()
        body = np.ascontiguousarray(self._data[:, :, :, : self.length])
        raw = body.data.cast("B") if body.nbytes else b""
        write_whole(path, MAGIC + len(meta).to_bytes(4, "little") + meta, raw, hashlib.sha256(raw).digest())

    @classmethod
    def load(cls, path: Path, shape: KvShape) -> KvCache:
        """Return the cache of a file that `save` wrote for the same model and span.

        Raises: FormatError bad-kv-file; WrongIdentity wrong-kv-file; SourceError.
        """
        try:
            data = path.read_bytes()
        except OSError as e:
            raise SourceError("read-failed", f"{path}: {e.strerror}") from e
        meta_length = int.from_bytes(data[4:8], "little")
        broken = FormatError("bad-kv-file", f"{path}: not a KV file, or cut short", hint="remove it and start over")
        if data[:4] != MAGIC or meta_length > META_CAP:
            raise broken
        try:
            meta = json.loads(data[8 : 8 + meta_length])
            length = meta.pop("length")
        except (ValueError, KeyError, AttributeError) as e:
            raise broken from e
        if meta != _identity(shape):
            raise WrongIdentity(
                "wrong-kv-file",
                f"{path}: expected the {shape.kind} KV of knot {shape.knot_id} layers {_identity(shape)['layers']}, "
                f"found {printable(meta.get('type'))} of knot {printable(meta.get('knot_id'))} "
                f"layers {printable(meta.get('layers'))}",
                hint="give each model and span its own --kv file",
            )
        body = data[8 + meta_length : -32]
        if not isinstance(length, int) or length < 0 or len(body) != length * shape.token_bytes:
            raise broken
        if hashlib.sha256(body).digest() != data[-32:]:
            raise broken
        cache = cls(shape)
        cache._data = cache._allocate(length)
        cache._data[:] = np.frombuffer(body, _DTYPES[shape.kind]).reshape(cache._data.shape)
        cache.length = length
        return cache


def _identity(shape: KvShape) -> dict[str, object]:
    return {
        "knot_id": shape.knot_id,
        "layers": [shape.span.start, shape.span.end],
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "type": str(shape.kind),
    }
