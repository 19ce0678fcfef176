"""What `inspect` tells of a knot or a GGUF: its tensors, and how many bytes each part of the model takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from knotctl.core.gguf.header import GgufFile, GgufValue
from knotctl.core.gguf.names import OUTPUT, OUTPUT_NORM, PHASES, ROPE_FREQS, TOKEN_EMBD, knot_name, layer_tensors
from knotctl.core.gguf.parts import GgufModel
from knotctl.core.knot.entry import KnotHeader
from knotctl.core.knot.from_gguf import payload_of
from knotctl.core.knot.gguf_config import config_of
from knotctl.core.knot.header import encode_header
from knotctl.core.knot.layout import DIGESTS_TENSOR, TOKENIZER_TENSOR
from knotctl.core.knot.writer import lay_out
from knotctl.core.qtypes import QType

_LAYER = re.compile(r"blk_([0-9]{1,6})_(.+)")
_PHASE_OF = {t.part: phase for phase in PHASES for t in layer_tensors(phase, 0)}
_PART_OF = {
    knot_name(TOKEN_EMBD): "token_embd",
    knot_name(ROPE_FREQS): "rope_freqs",
    knot_name(OUTPUT_NORM): "output",
    knot_name(OUTPUT): "output",
    TOKENIZER_TENSOR: "tokenizer",
    DIGESTS_TENSOR: "digests",
}
_PARTS = ("token_embd", "rope_freqs", *PHASES, "layer, other", "other", "output", "tokenizer", "digests")


class TensorRow(NamedTuple):
    """One tensor as it lies in the file. Shapes: row-major. Units: offset (from the file's start) and bytes."""

    name: str
    qtype: QType
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sha256: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the tensor's object in the document of `inspect --json`."""
        return {
            "name": self.name,
            "type": self.qtype.name,
            "shape": list(self.shape),
            "offset": self.offset,
            "bytes": self.bytes,
            "sha256": self.sha256,
        }


class PartSize(NamedTuple):
    """One part of a model: a phase over all layers, or what is used once. `largest` is that of its largest layer."""

    part: str
    tensors: int
    bytes: int
    largest: int
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A model file described: what its header says, its tensors in file order, its parts in the order of use."""

    format: str
    file_bytes: int
    facts: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    parts: tuple[PartSize, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `inspect --json`."""
        return {
            "format": self.format,
            "file_bytes": self.file_bytes,
            **self.facts,
            "parts": [p._asdict() for p in self.parts],
            "tensors": [t.to_json() for t in self.tensors],
        }


def describe_knot(header: KnotHeader) -> Description:
    """Return the description of a knot."""
    rows = tuple(
        TensorRow(e.name, e.qtype, e.shape, header.payload_offset + e.offset, e.length, e.sha256)
        for e in header.tensors
    )
    facts = {
        "knot_id": header.knot_id,
        "encoder": header.encoder,
        "payload_offset": header.payload_offset,
        "payload_bytes": header.payload_bytes,
        "source": dict(header.source),
        "config": header.config.to_json(),
    }
    return Description("knot", header.file_bytes, facts, rows, sizes_by_part((r.name, r) for r in rows))


def describe_encoding(model: GgufModel, vocab_size: int | None = None) -> Description:
    """Return the description of the knot that a model will be encoded into; digests are not known before it is.

    Raises: GgufError, UsageError bad-vocab-size.
    """
    config = config_of(model, vocab_size)
    entries, table = lay_out(payload_of(model))
    source = {"format": "gguf", "version": model.version}
    start = len(encode_header(config, [*entries, table], source=source))
    rows = tuple(TensorRow(e.name, e.qtype, e.shape, start + e.offset, e.length, None) for e in (*entries, table))
    parts = sizes_by_part((r.name, r) for r in rows)
    # The tables of ids are read by rows, so that of the weights it is one phase that a station has to hold.
    least = max((p.largest for p in parts if p.part in PHASES), default=0)
    facts = {
        "payload_offset": start,
        "payload_bytes": table.end,
        "station_weight_bytes": least,
        "config": config.to_json(),
    }
    return Description("knot", start + table.end, facts, rows, parts)


def describe_gguf(file: GgufFile) -> Description:
    """Return the description of a GGUF; of arrays in the metadata it holds type and length."""
    rows = tuple(TensorRow(t.name, t.qtype, t.shape, t.offset, t.length, None) for t in file.tensors)
    facts = {
        "version": file.version,
        "alignment": file.alignment,
        "data_offset": file.data_offset,
        "metadata": {key: _plain(value) for key, value in file.metadata.items()},
    }
    return Description("gguf", file.size, facts, rows, sizes_by_part((knot_name(r.name), r) for r in rows))


def sizes_by_part(tensors: Iterable[tuple[str, TensorRow]]) -> tuple[PartSize, ...]:
    """Return the size of each part that has tensors, in the order of use, from (knot name, tensor) pairs."""
    found: dict[str, dict[str, list[TensorRow]]] = {}
    for name, row in tensors:
        at = _LAYER.fullmatch(name)
        part = _PHASE_OF.get(at[2], "layer, other") if at else _PART_OF.get(name, "other")
        found.setdefault(part, {}).setdefault(at[1] if at else "", []).append(row)
    return tuple(_size(part, list(found[part].values())) for part in _PARTS if part in found)


def _size(part: str, layers: list[list[TensorRow]]) -> PartSize:
    rows = [r for layer in layers for r in layer]
    types = tuple(dict.fromkeys(r.qtype.name for r in sorted(rows, key=lambda r: -r.bytes)))
    largest = max(sum(r.bytes for r in layer) for layer in layers)
    return PartSize(part, len(rows), sum(r.bytes for r in rows), largest, types)


def _plain(value: GgufValue) -> Any:
    if value.item is None:
        # JSON has no NaN and no infinity
        return value.value if value.value == value.value and value.value not in (1e999, -1e999) else str(value.value)
    return {"array_of": value.item.name.lower(), "length": len(value.value)}  # type: ignore[arg-type]
