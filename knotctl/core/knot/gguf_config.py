"""The config that a GGUF's keys and tensors give, and its metadata values as JSON holds them.

Of an architecture that we know, what it cannot run without is an error here; of any other, what cannot be derived is 0.

Source: CONTRACT section 1; ggml's gguf specification for the keys and their defaults.
"""

from __future__ import annotations

import math
from typing import NoReturn

from knotctl.core.errors import GgufError, UsageError, printable
from knotctl.core.gguf.header import GgufTensor
from knotctl.core.gguf.limits import ValueType
from knotctl.core.gguf.names import ARCHITECTURES, OUTPUT, TOKEN_EMBD, required_tensors, split_layer
from knotctl.core.gguf.parts import GgufModel
from knotctl.core.knot.config import KnotConfig, Scalar
from knotctl.core.knot.layout import INT_CAP

# llama.cpp's default where a model does not say.
_ROPE_THETA = 10_000.0
TOKENIZER_KEYS = "tokenizer."
# Texts of the tokenizer are scalars to GGUF and tables to us: they are held in knot_tokenizer alone.
_TOKENIZER_TEXTS = ("tokenizer.chat_template", "tokenizer.huggingface.")


def config_of(model: GgufModel, vocab_size: int | None = None) -> KnotConfig:
    """Return the config of a model; `vocab_size` wins over what the file says.

    Raises: GgufError that names the first key or tensor that is missing or wrong, UsageError bad-vocab-size.
    """
    return _Keys(model).config(vocab_size)


def plain_value(model: GgufModel, key: str) -> object:
    """Return a metadata value as JSON holds it; a float is the double that equals the file's.

    Raises: GgufError non-finite-value.
    """
    found = model.metadata[key]
    if isinstance(found.value, bool | int | float | str):
        return _finite(model, key, found.value)
    if isinstance(found.value, list):
        return found.value
    if found.item is ValueType.BOOL:
        return [bool(v) for v in found.value]
    if found.item in (ValueType.F32, ValueType.F64):
        return [_finite(model, key, v) for v in found.value]
    return found.value.tolist()


def _finite(model: GgufModel, key: str, value: Scalar) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        fail(model, "non-finite-value", f"key {key}: expected finite numbers, found {value}")
    return value


def fail(model: GgufModel, code: str, what: str, hint: str | None = None) -> NoReturn:
    """Raise the error that a model's file is at fault for; what it says of itself is shown escaped."""
    raise GgufError(code, printable(f"{model.name}: {what}", 4096), hint=hint)


class _Keys:
    """The keys under a model's architecture, strict where we know the architecture."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.tensors: dict[str, GgufTensor] = {t.name: t for t, _ in model.tensors}
        found = self.value("general.architecture")
        if found is None:
            self.fail("missing-key", "key general.architecture: expected a string, found no such key")
        if type(found) is not str:
            kind = model.metadata["general.architecture"].type.name
            self.fail("wrong-type", f"key general.architecture: expected a string, found {kind}")
        if not found:
            self.fail("bad-value", "key general.architecture: expected a name, found an empty string")
        self.architecture = found
        self.known = self.architecture in ARCHITECTURES

    def config(self, vocab_size: int | None) -> KnotConfig:
        n_layers = self.integer("block_count")
        n_heads = self.integer("attention.head_count")
        hidden_size = self.integer("embedding_length")
        embedding_rows, columns = self.embedding()
        if self.known:
            self.check_tensors(n_layers)
            if columns != hidden_size:
                self.fail("wrong-shape", f"tensor {TOKEN_EMBD}: expected rows of {hidden_size}, found {columns}")
            if hidden_size % n_heads and self.value(f"{self.architecture}.attention.key_length") is None:
                what = f"attention.head_count: expected a divisor of {hidden_size}, found {n_heads}"
                self.fail("bad-value", f"key {self.architecture}.{what}")
        n_kv_heads = self.integer("attention.head_count_kv", n_heads)
        head_dim = self.integer("attention.key_length", hidden_size // n_heads if n_heads else 0)
        return KnotConfig(
            architecture=self.architecture,
            hidden_size=columns or hidden_size,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_size=self.integer("feed_forward_length"),
            vocab_size=self.vocab_size(vocab_size, embedding_rows),
            embedding_rows=embedding_rows,
            context_length=self.integer("context_length"),
            rms_eps=self.real("attention.layer_norm_rms_epsilon"),
            rope_theta=self.real("rope.freq_base", _ROPE_THETA),
            rope_dim=self.integer("rope.dimension_count", head_dim),
            tied_embedding=OUTPUT not in self.tensors,
            gguf=self.scalars(),
        )

    def scalars(self) -> dict[str, Scalar]:
        return {
            key: _finite(self.model, key, found.value)
            for key, found in self.model.metadata.items()
            if isinstance(found.value, bool | int | float | str) and not key.startswith(_TOKENIZER_TEXTS)
        }

    def embedding(self) -> tuple[int, int]:
        """Return rows and columns of the token table, zeros where the model has none."""
        t = self.tensors.get(TOKEN_EMBD)
        if t is None:
            return 0, 0
        if len(t.shape) != 2 or 0 in t.shape:
            self.fail("wrong-shape", f"tensor {TOKEN_EMBD}: expected [rows, columns], found {list(t.shape)}")
        return t.shape[0], t.shape[1]

    def vocab_size(self, wanted: int | None, rows: int) -> int:
        # CONTRACT section 1: the option, else the key, else the number of tokens
        tokens = self.model.metadata.get("tokenizer.ggml.tokens")
        listed = len(tokens.value) if tokens is not None and isinstance(tokens.value, list) else rows
        size = self.integer("vocab_size", listed)
        if wanted is not None:
            if wanted < 1 or (rows and wanted > rows):
                raise UsageError("bad-vocab-size", f"--vocab-size {wanted}: expected 1 to {rows}, the embedding's rows")
            return wanted
        if rows and not 0 < size <= rows:
            what = f"vocabulary: expected 1 to {rows} tokens, the rows of {TOKEN_EMBD}, found {size}"
            self.fail("bad-value", what, hint="--vocab-size sets it")
        return size

    def check_tensors(self, n_layers: int) -> None:
        """Refuse layers beyond block_count, and the first tensor in payload order that is missing."""
        for name in self.tensors:
            at = split_layer(name)
            if at is not None and at[0] >= n_layers:
                what = f"tensor {name}: expected layers 0 to {n_layers - 1}, as block_count says, found layer {at[0]}"
                self.fail("extra-layer", what)
        if self.integer("expert_count", 0):
            return  # a mixture of experts has other tensors; whether it can run is for who runs it to say
        for name in required_tensors(self.architecture, n_layers):
            if name not in self.tensors:
                self.fail("missing-tensor", f"tensor {name}: missing; {self.architecture} needs it")

    # Keys

    def integer(self, name: str, default: int | None = None) -> int:
        key = f"{self.architecture}.{name}"
        value = self.value(key)
        if value is None:
            return self.absent(key, "an integer") if default is None else default
        if type(value) is not int:
            return self.wrong_type(key, "an integer")
        least = 1 if self.known and default != 0 else 0
        if not least <= value <= INT_CAP:
            self.fail("bad-value", f"key {key}: expected an integer from {least} to 2^63-1, found {value}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        key = f"{self.architecture}.{name}"
        value = self.value(key)
        if value is None:
            return self.absent(key, "a number") if default is None else default
        if type(value) not in (int, float):
            return self.wrong_type(key, "a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number) or number < 0 or (number == 0 and self.known):
            self.fail("bad-value", f"key {key}: expected a finite number above 0, found {number}")
        return number

    def value(self, key: str) -> object:
        found = self.model.metadata.get(key)
        return None if found is None else found.value

    def absent(self, key: str, kind: str) -> int:
        if self.known:
            self.fail("missing-key", f"key {key}: expected {kind}, found no such key")
        return 0

    def wrong_type(self, key: str, kind: str) -> int:
        # Some architectures give a value a layer, as an array: of no use to a config, and no fault either.
        found = self.model.metadata[key]
        if self.known or found.type is not ValueType.ARRAY:
            self.fail("wrong-type", f"key {key}: expected {kind}, found {found.type.name}")
        return 0

    def fail(self, code: str, what: str, hint: str | None = None) -> NoReturn:
        fail(self.model, code, what, hint)
