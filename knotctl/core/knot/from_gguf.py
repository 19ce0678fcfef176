"""From a GGUF to a knot: tensors in the order of use, the tokenizer packed, the whole written and proved.

A container does not judge: any architecture is encoded, whether it can run here or not.

Source: CONTRACT section 1; DESIGN decisions 1 and 2.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from knotctl.core.errors import printable
from knotctl.core.gguf.header import GgufTensor
from knotctl.core.gguf.names import ARCHITECTURES, knot_name, order_key
from knotctl.core.gguf.parts import PART_NAME, GgufModel, open_gguf
from knotctl.core.knot.config import KnotConfig
from knotctl.core.knot.gguf_config import TOKENIZER_KEYS, config_of, fail, plain_value
from knotctl.core.knot.layout import DIGESTS_TENSOR, TOKENIZER_CAP, TOKENIZER_TENSOR
from knotctl.core.knot.writer import Advance, PayloadTensor, check_destination, write_knot
from knotctl.core.qtypes import QTYPES
from knotctl.core.source.base import ByteSource

# Higher levels gain a few per cent of 2 MiB and take seconds.
_ZSTD_LEVEL = 9


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """What was written. Units: all sizes and the offset in bytes; `tensors` counts our own two as well."""

    path: Path
    file_bytes: int
    knot_id: str
    payload_offset: int
    tensors: int
    config: KnotConfig
    bytes_by_type: dict[str, int]
    warnings: tuple[str, ...]


def encode_gguf(
    src: str,
    dest: str | Path,
    *,
    force: bool = False,
    jobs: int | None = None,
    vocab_size: int | None = None,
    advance: Advance = lambda _: None,
) -> EncodeResult:
    """Encode a GGUF, whole or split, and return what was written; see encode_model.

    Raises: GgufError, UsageError, SourceError.
    """
    check_destination(Path(dest), force=force, src=src)
    with open_gguf(src) as model:
        return encode_model(model, dest, force=force, jobs=jobs, vocab_size=vocab_size, advance=advance)


def encode_model(
    model: GgufModel,
    dest: str | Path,
    *,
    force: bool = False,
    jobs: int | None = None,
    vocab_size: int | None = None,
    advance: Advance = lambda _: None,
) -> EncodeResult:
    """Encode an open GGUF and return what was written; the same model and version give the same bytes.

    Whatever happens, `dest` holds what it held before or the whole knot, and no other file is left.

    Units: advance gets bytes, work_bytes(model) of them in all, one call at a time but from any thread.
    Raises: GgufError, UsageError, SourceError.
    """
    config = config_of(model, vocab_size)
    source = {"format": "gguf", "version": model.version}
    header = write_knot(Path(dest), config, payload_of(model), source=source, force=force, jobs=jobs, advance=advance)
    by_type: Counter[str] = Counter()
    for t, _ in model.tensors:
        by_type[t.qtype.name] += t.length
    warnings = []
    if config.architecture not in ARCHITECTURES:
        name, known = printable(config.architecture), ", ".join(ARCHITECTURES)
        warnings.append(f"architecture {name}: knotctl can hold it but not run it; it runs {known}")
    return EncodeResult(
        path=Path(dest),
        file_bytes=header.file_bytes,
        knot_id=header.knot_id,
        payload_offset=header.payload_offset,
        tensors=len(header.tensors),
        config=config,
        bytes_by_type=dict(by_type.most_common()),
        warnings=tuple(warnings),
    )


def default_destination(src: str) -> Path:
    """Return the knot's path where none was given: beside a file, in the working folder for a URL."""
    path = Path(src.rpartition("/")[2] if "://" in src else src)
    stem = PART_NAME.fullmatch(path.name)
    return path.with_name((stem["stem"] if stem else path.name.removesuffix(".gguf")) + ".knot")


def work_bytes(model: GgufModel) -> int:
    """Return what `advance` counts up to: every byte once while it is copied and once while it is proved."""
    return 2 * model.tensor_bytes


def payload_of(model: GgufModel) -> list[PayloadTensor]:
    """Return the payload's tensors in order, the tokenizer last. Raises: GgufError."""
    tensors = []
    seen = dict.fromkeys((TOKENIZER_TENSOR, DIGESTS_TENSOR), "a tensor of knotctl's own")
    for t, source in sorted(model.tensors, key=lambda item: order_key(item[0].name)):
        name = knot_name(t.name)
        if name in seen:
            fail(model, "duplicate-tensor", f"tensor {t.name}: is {name} in a knot, and so is {seen[name]}")
        seen[name] = f"tensor {t.name}"
        tensors.append(PayloadTensor(name, t.qtype, t.shape, t.length, _reader(source, t)))
    packed = pack_tokenizer(model)

    def read_packed(offset: int, out: memoryview) -> None:
        out[:] = packed[offset : offset + len(out)]

    tensors.append(PayloadTensor(TOKENIZER_TENSOR, QTYPES["I8"], (len(packed),), len(packed), read_packed))
    return tensors


def _reader(source: ByteSource, tensor: GgufTensor) -> Callable[[int, memoryview], None]:
    return lambda offset, out: source.read_into(tensor.offset + offset, out)


def pack_tokenizer(model: GgufModel) -> bytes:
    """Return the `tokenizer.*` keys and values, chat templates among them, as zstd-compressed JSON in the file's order.

    Raises: GgufError tokenizer-too-large, non-finite-value.
    """
    import zstandard

    keys = {key: plain_value(model, key) for key in model.metadata if key.startswith(TOKENIZER_KEYS)}
    text = json.dumps(keys, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > TOKENIZER_CAP:
        fail(model, "tokenizer-too-large", f"tokenizer: expected at most {TOKENIZER_CAP} bytes, found {len(text)}")
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(text)
