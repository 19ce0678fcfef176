"""Vocabularies small enough to read, with everything that the large ones have."""

from __future__ import annotations

from typing import Any

from knotctl.core.tokens.bpe import STAND_INS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MERGES = [
    "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "1 2", "3 4",
    "12 3", "' s", "a a", "aa aa", "aaaa aaaa", "Ã ©", "æ Ĺ", "æĹ ¥", "Ġ 1", "! !", "< |", "i m", "Ġ <|", "i n", "in e",
]  # fmt: skip
SPECIALS = [
    ("<|endoftext|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<tool>", USER_DEFINED),
    ("\t\t", USER_DEFINED), ("[PAD0]", UNUSED), ("<|fim_pad|>", CONTROL), ("<|fim_prefix|>", NORMAL),
]  # fmt: skip


def bpe_keys(pre: str = "qwen2", **changes: Any) -> dict[str, Any]:
    """Keys of a byte-level vocabulary; changes are given as in `add_bos_token=True`, None takes a key away."""
    tokens = [*STAND_INS.values(), *(m.replace(" ", "") for m in MERGES), *(t for t, _ in SPECIALS)]
    kinds = [NORMAL] * (len(tokens) - len(SPECIALS)) + [k for _, k in SPECIALS]
    keys = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": list(MERGES),
        "bos_token_id": tokens.index("<|im_start|>"), "eos_token_id": tokens.index("<|im_end|>"),
        "add_bos_token": False,
    } | changes  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}


PIECES = {
    "▁": -1.0, "h": -2.0, "e": -3.0, "l": -4.0, "o": -5.0, "he": -6.0, "ll": -7.0, "hell": -8.0, "hello": -9.0,
    "▁hello": -10.0, "▁w": -11.0, "or": -12.0, "ld": -13.0, "▁wor": -14.0, "▁world": -15.0, "▁▁": -16.0,
    "▁▁▁▁": -17.0, "w": -18.0, "r": -19.0, "d": -20.0, "日": -21.0, "本": -22.0, "日本": -23.0, "x▁y": -24.0,
    "x▁": -25.0, "x": -26.0, "y": -27.0, "aa": -28.0, "aaaa": -28.0, "a": -28.0, "aaa": -28.0, "é": -29.0, "/s>": -30.0,
    "</": -31.0, "<": -32.0, "/": -33.0, "s": -34.0, ">": -35.0, "s>": -36.0,
}  # fmt: skip


def spm_keys(**changes: Any) -> dict[str, Any]:
    """Keys of a SentencePiece-style vocabulary with every byte token."""
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<b>", USER_DEFINED), ("\n\n", USER_DEFINED)]
    bytes_ = [(f"<0x{b:02X}>", BYTE) for b in range(256)]
    entries = [(t, k, 0.0) for t, k in (*special, *bytes_)] + [(t, NORMAL, s) for t, s in PIECES.items()]
    keys = {
        "model": "llama", "tokens": [t for t, _, _ in entries], "token_type": [k for _, k, _ in entries],
        "scores": [s for _, _, s in entries], "add_bos_token": True, "add_space_prefix": True,
    } | changes  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}
