"""Whether a knot is whole: every tensor that its architecture needs, each phase one range of bytes.

Only for architectures we know: a container does not judge others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from knotctl.core.findings import Finding
from knotctl.core.gguf.names import ARCHITECTURES, OUTPUT, PHASES, knot_name, layer_tensors, required_tensors
from knotctl.core.knot.codes import finding
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.layout import TOKENIZER_TENSOR

# A header can claim 2**63 layers; what is missing beyond this many tensors is not looked for.
_MISSING_CAP = 10_000


def verify_whole(header: KnotHeader) -> Iterator[Finding]:
    """Yield a finding for every tensor that is missing, and for every phase that is not one range."""
    if header.config.architecture in ARCHITECTURES:
        entries = {e.name: e for e in header.tensors}
        for name in islice(_missing(header, entries), _MISSING_CAP):
            message = f"missing; every {header.config.architecture} model of {header.config.n_layers} layers has it"
            yield finding("missing-tensor", message, tensor=name)
        yield from _scattered(header, entries)


def _missing(header: KnotHeader, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    for gguf_name in required_tensors(header.config.architecture, header.config.n_layers):
        if (name := knot_name(gguf_name)) not in entries:
            yield name
    if not header.config.tied_embedding and knot_name(OUTPUT) not in entries:
        yield knot_name(OUTPUT)
    if TOKENIZER_TENSOR not in entries:
        yield TOKENIZER_TENSOR


def _scattered(header: KnotHeader, entries: Mapping[str, TensorEntry]) -> Iterator[Finding]:
    for layer in range(header.config.n_layers):
        alone = True
        for phase in PHASES:
            present = [entries[p.knot] for p in layer_tensors(phase, layer) if p.knot in entries]
            if not present:
                continue
            alone = False
            start, end = min(e.offset for e in present), max(e.end for e in present)
            if end - start != sum(e.length for e in present):
                message = f"phase {phase} of layer {layer}: expected one range of bytes, found other tensors between"
                place = header.payload_offset + start
                yield finding("out-of-order", message, tensor=present[0].name, offset=place)
        if alone:
            return  # _missing has said it
