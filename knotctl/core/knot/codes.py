"""The code of every finding about a knot: how much it matters, what mends it, and what it means in a line.

A code is also the fixture's name (fixtures/knots), the heading in man knot(5), the test's id and the SARIF rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from knotctl.core.findings import Finding, Severity
from knotctl.core.knot.layout import JSON_OFFSET

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


@dataclass(frozen=True, slots=True)
class Code:
    """What a code says: its severity, the command that mends it ("repair", "encode", "" for none), its meaning.

    `told_by` is what it takes to tell: "structure" (header and file size), "data" (payload), "source" (the GGUF).
    """

    severity: Severity
    mend: str
    meaning: str
    told_by: str = "structure"


CODES: dict[str, Code] = {
    "unreadable": Code(ERROR, "", "The bytes could not be had; of several knots the others were verified."),
    "not-a-knot": Code(ERROR, "", "The file does not begin with the magic bytes KNOT."),
    "bad-version": Code(ERROR, "encode", "The version is not 1."),
    "truncated": Code(ERROR, "encode", "The file ends before the header or the payload does."),
    "bad-meta-length": Code(ERROR, "encode", "The metadata's length cannot be that of an object, or is over the cap."),
    "bad-json": Code(ERROR, "encode", "The metadata is not one strict JSON object in UTF-8."),
    "duplicate-key": Code(ERROR, "encode", "An object of the metadata names a key twice."),
    "bad-metadata": Code(ERROR, "encode", "The metadata differs from what was encoded, by its own digest."),
    "stale-layout": Code(ERROR, "repair", "The layout of encoders before 2026-04-25: the payload begins a byte early."),
    "bad-padding": Code(ERROR, "repair", "Bytes between the JSON and the marker that are not NUL, or a padded JSON."),
    "bad-marker": Code(ERROR, "repair", "The byte before the payload is not the codec marker."),
    "trailing-bytes": Code(ERROR, "repair", "Bytes follow the last tensor."),
    "bad-field": Code(ERROR, "encode", "A field of the metadata is missing or of the wrong kind."),
    "bad-config": Code(ERROR, "encode", "A field of the config is missing or of the wrong kind."),
    "config-mismatch": Code(ERROR, "encode", "The config and the tensors disagree."),
    "padded-vocabulary": Code(NOTE, "", "The embedding has rows beyond the vocabulary; ids of theirs are refused."),
    "bad-name": Code(ERROR, "encode", "A tensor's name is empty, too long, or not printable ASCII."),
    "duplicate-tensor": Code(ERROR, "encode", "Two tensors have one name."),
    "unknown-type": Code(ERROR, "encode", "A tensor has no type, or one that is not known."),
    "legacy-type-field": Code(WARNING, "repair", "A tensor's type is spelt `tensor_type`."),
    "type-conflict": Code(ERROR, "encode", "A tensor's `type` and `tensor_type` disagree."),
    "bad-shape": Code(ERROR, "encode", "A tensor's shape is not a list of up to four sizes."),
    "off-block-row": Code(ERROR, "encode", "A tensor's row is not a whole number of its type's blocks."),
    "bad-offset": Code(ERROR, "encode", "A tensor's offset is not an integer from 0."),
    "bad-length": Code(ERROR, "encode", "A tensor's length is not that of its type and shape."),
    "overlap": Code(ERROR, "encode", "Two tensors share bytes."),
    "gap": Code(ERROR, "repair", "Bytes between two tensors belong to none."),
    "out-of-order": Code(WARNING, "repair", "Tensors do not lie in the order of use: a phase is not one range."),
    "missing-tensor": Code(ERROR, "encode", "A tensor that the architecture needs is not there."),
    "missing-digest": Code(WARNING, "repair", "No digest of metadata, tensor or chunks: damage goes unfound."),
    "bad-digest": Code(ERROR, "encode", "A tensor's sha256 is not 64 lower-case hexadecimal digits."),
    "bad-digest-table": Code(
        ERROR, "repair", "The digest table is not the last tensor, or not of the payload's length."
    ),
    "digest-mismatch": Code(ERROR, "encode", "Bytes differ from those that were encoded.", "data"),
    "bad-tokenizer": Code(ERROR, "encode", "The tokenizer cannot be unpacked, or does not fit the config.", "data"),
    "bad-template": Code(WARNING, "", "The chat template fails on a plain question: the model cannot chat.", "data"),
    "non-finite-scale": Code(ERROR, "encode", "A block's scale is NaN or infinite.", "data"),
    "insane-scale": Code(
        ERROR, "encode", "A block's scale is absurdly large: the symptom of a shifted payload.", "data"
    ),
    "all-zero": Code(ERROR, "encode", "Every element of a matrix is zero: its bytes were lost.", "data"),
    "source-mismatch": Code(ERROR, "encode", "The knot is not an encoding of that GGUF.", "source"),
}


def finding(code: str, message: str, *, offset: int | None = JSON_OFFSET, tensor: str | None = None) -> Finding:
    """Return a finding of that code, at the code's severity, in the metadata unless an offset says otherwise.

    verify fills in the repair command.
    """
    return Finding(code, CODES[code].severity, message, offset=offset, tensor=tensor)
