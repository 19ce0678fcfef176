"""The model's shape as the header's `config` states it: the sizes every stage computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

Scalar = str | int | float | bool

# Field -> its name in the JSON, in the order it is written.
JSON_NAMES: dict[str, str] = {
    "architecture": "architecture",
    "hidden_size": "hiddenDim",
    "n_layers": "numLayers",
    "n_heads": "numHeads",
    "n_kv_heads": "numKvHeads",
    "head_dim": "headDim",
    "ffn_size": "ffnDim",
    "vocab_size": "vocabSize",
    "embedding_rows": "embeddingRows",
    "context_length": "contextLength",
    "rms_eps": "rmsEps",
    "rope_theta": "ropeTheta",
    "rope_dim": "ropeDim",
    "tied_embedding": "tiedEmbedding",
    "gguf": "gguf",
}


@dataclass(frozen=True, slots=True)
class KnotConfig:
    """Sizes of the model. 0 is "the source does not say": a container holds what it cannot run.

    Ids from vocab_size to embedding_rows are padding: owned by no shard, refused at every edge. `gguf` holds every
    scalar GGUF key-value that is not a table of the tokenizer, unknown ones too.
    """

    architecture: str
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    embedding_rows: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_dim: int
    tied_embedding: bool
    gguf: Mapping[str, Scalar]

    def to_json(self) -> dict[str, object]:
        """Return the `config` object of the header, in the order it is written."""
        return {JSON_NAMES[f.name]: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> KnotConfig:
        """Return the config of a `config` object that the validator (checks.py) has passed."""
        return cls(**{field: document[name] for field, name in JSON_NAMES.items()})  # type: ignore[arg-type]
