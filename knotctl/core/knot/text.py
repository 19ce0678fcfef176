"""Whether a knot's tokenizer can be built and fits its model, and its chat template can be rendered."""

from __future__ import annotations

from collections.abc import Iterator

from knotctl.core.errors import KnotctlError, ModelError, RequestError
from knotctl.core.findings import Finding
from knotctl.core.knot.codes import finding
from knotctl.core.knot.entry import KnotHeader
from knotctl.core.knot.layout import TOKENIZER_TENSOR
from knotctl.core.knot.reader import unpack_tokenizer
from knotctl.core.source.base import ByteSource


def verify_tokenizer(source: ByteSource, header: KnotHeader) -> Iterator[Finding]:
    """Yield what is wrong with the tokenizer: it cannot be unpacked or built, has ids that the model lacks, or a chat
    template that fails.

    One that knotctl cannot run is no defect of the file. Raises: SourceError.
    """
    entry = next((e for e in header.tensors if e.name == TOKENIZER_TENSOR), None)
    if entry is None:
        return
    from knotctl.core.tokens.chat import ChatTemplate
    from knotctl.core.tokens.tokenizer import load_tokenizer

    span = header.range_of(entry)
    packed = source.read(span.start, len(span))
    try:
        tokenizer = load_tokenizer(unpack_tokenizer(packed))
    except KnotctlError as e:
        if not isinstance(e, ModelError) or e.code == "bad-tokenizer":
            message = e.message.removeprefix(f"knot: {TOKENIZER_TENSOR}: ")
            yield finding("bad-tokenizer", message, tensor=entry.name, offset=span.start)
        return
    rows, size = header.config.embedding_rows, tokenizer.vocab_size
    if rows and size > rows:
        message = f"expected at most {rows} tokens, the embedding's rows; found {size}"
        yield finding("bad-tokenizer", message, tensor=entry.name, offset=span.start)
    try:
        ChatTemplate.of(tokenizer).render([{"role": "user", "content": "hello"}])
    except RequestError:
        pass  # a template may refuse a conversation
    except ModelError as e:
        yield finding("bad-template", e.message, tensor=entry.name, offset=span.start)
