"""What a model weighs: bytes of each layer, embedding and head at each quantisation, and the work each layer is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from knotctl.core.spans import LayerSpan

MAX_LAYERS = 10_000
MAX_BYTES = 1 << 50  # of one layer, one node or one table: a pebibyte is beyond every machine


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """A model's bytes at one quantisation. Units: bytes.

    prefix[k] is the bytes of the layers before k. The embedding counts on the node of layer 0, the head (final norm
    and output matrix) on the node of the last layer; `shared` is what the two have in common where one node has both.
    """

    quantization: str
    prefix: tuple[int, ...]
    embedding: int
    head: int
    shared: int
    # Bytes of the k smallest layers: how many layers fit, at the most, wherever they are.
    smallest: tuple[int, ...]

    @classmethod
    def of(cls, quantization: str, layers: Sequence[int], embedding: int, head: int, shared: int = 0) -> LayerSizes:
        """Return the sizes of layers of so many bytes each."""
        return cls(quantization, sums(layers), embedding, head, shared, sums(sorted(layers)))

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.prefix) - 1

    @property
    def total(self) -> int:
        """Bytes of the model on one node."""
        return self.span_bytes(0, self.n_layers)

    def span_bytes(self, start: int, end: int) -> int:
        """Return the bytes that the owner of layers [start, end) holds, embedding and head where they are its."""
        if start >= end:
            return 0
        size = self.prefix[end] - self.prefix[start]
        first, last = start == 0, end == self.n_layers
        if first:
            size += self.embedding
        if last:
            size += self.head
        return size - self.shared if first and last else size

    def end_from(self, start: int, room: int) -> int:
        """Return the furthest end of a span from `start` that fits into so many bytes; `start` where none does."""
        if start >= self.n_layers:
            return start
        room_left = room - (self.embedding if start == 0 else 0)
        end = max(start, bisect_right(self.prefix, self.prefix[start] + room_left) - 1)
        if end >= self.n_layers:
            fits = self.span_bytes(start, self.n_layers) <= room
            return self.n_layers if fits else self.n_layers - 1
        return end

    def start_to(self, end: int, room: int) -> int:
        """Return the furthest start of a span to `end` that fits into so many bytes; `end` where none does."""
        start = end
        while start > 0 and self.span_bytes(start - 1, end) <= room:
            start -= 1
        return start

    def most_layers(self, room: int) -> int:
        """Return a number of layers that no span within so many bytes exceeds."""
        return min(self.n_layers, bisect_right(self.smallest, room) - 1) if room >= 0 else 0


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """A model as the planner sees it: never its weights.

    work[k] is the weights (in any unit) that a token meets in the layers before k, head_work those of the output
    matrix: what a node's time is shared out by. quantizations are those whose bytes the model states; sizes_at gives
    the bytes at one by its canonical name, None where nobody knows them.
    Units: activation_bytes a node, kv_token_bytes a layer and token; 0 where unknown.
    """

    name: str
    work: tuple[int, ...]
    head_work: int
    parameters: int
    hidden_size: int
    activation_bytes: int
    kv_token_bytes: int
    context_length: int
    native: str | None
    quantizations: tuple[str, ...]
    sizes_at: Callable[[str], LayerSizes | None]
    most_work: tuple[int, ...] = field(init=False)  # of the k layers of the most work

    def __post_init__(self) -> None:
        layers = sorted((b - a for a, b in pairwise(self.work)), reverse=True)
        object.__setattr__(self, "most_work", sums(layers))

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.work) - 1

    @property
    def span(self) -> LayerSpan:
        """All layers."""
        return LayerSpan(0, self.n_layers)

    @property
    def total_work(self) -> int:
        """Work of a token through all layers and the output matrix."""
        return self.work[-1] + self.head_work

    def work_of(self, start: int, end: int) -> int:
        """Return the work of a token through layers [start, end), the output matrix with the last."""
        return self.work[end] - self.work[start] + (self.head_work if start < end == self.n_layers else 0)


def sums(values: Sequence[int]) -> tuple[int, ...]:
    """Return the sums of the first 0, 1, 2… values."""
    return tuple(accumulate(values, initial=0))
