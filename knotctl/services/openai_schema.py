"""Requests of OpenAI's chat and completion endpoints, checked whole: what passes can be run, and nothing is ignored.

A field that would change the answer and is not supported is refused by name, as is one nobody knows. `null` is absent.
Source: OpenAI API reference, chat and completions; man knot-service(5), REQUESTS.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knotctl.core.errors import RequestError, printable
from knotctl.core.strict_json import parse_json_object
from knotctl.core.tokens.sampler import SamplingParams

MAX_MESSAGES = 2048
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
# OpenAI's default for completions; a chat answer may fill the context.
COMPLETION_TOKENS = 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that name the caller or where to keep the answer: nothing here depends on them.
_HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
# Fields of features that are not there, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "grammar": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "web_search_options": (),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request that can be run. `messages` of a chat, else `prompt`: text, or token ids."""

    model: str
    messages: list[dict[str, str]] | None
    prompt: str | list[int]
    params: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None


def parse_body(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises: RequestError."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError("bad-content-type", f"Content-Type {printable(content_type)!r}: expected application/json")
    return parse_json_object(body, lambda code, what: RequestError(code, f"request body: {what}"))


def parse_chat(document: Mapping[str, Any], vocab_size: int) -> GenerationRequest:
    """Return the request that the body of /v1/chat/completions makes. Raises: RequestError with `param`."""
    fields = _Fields(document)
    messages = _messages(fields.take("messages"))
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise _invalid("top_logprobs", "needs logprobs to be true")
    limits = [fields.integer(name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    given = {n for n in limits if n is not None}
    if len(given) > 1:
        raise _invalid("max_tokens", "differs from max_completion_tokens")
    logprobs = (top or 0) if wanted else None
    return _request(fields, vocab_size, messages, "", next(iter(given), None), logprobs)


def parse_completion(document: Mapping[str, Any], vocab_size: int) -> GenerationRequest:
    """Return the request that the body of /v1/completions makes. Raises: RequestError with `param`."""
    fields = _Fields(document)
    prompt = _prompt(fields.take("prompt"), vocab_size)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", 1, None)
    return _request(fields, vocab_size, None, prompt, max_tokens or COMPLETION_TOKENS, logprobs)


def _request(
    fields: _Fields,
    vocab_size: int,
    messages: list[dict[str, str]] | None,
    prompt: str | list[int],
    max_tokens: int | None,
    logprobs: int | None,
) -> GenerationRequest:
    """Return the request of the fields that both endpoints have, with those that they do not."""
    model = fields.take("model")
    if not isinstance(model, str):
        raise _missing("model") if model is None else _type("model", "a string", model)
    seed = fields.integer("seed", -(1 << 63), (1 << 63) - 1)
    params = SamplingParams(
        temperature=fields.number("temperature", 0, 2, 1),
        top_k=fields.integer("top_k", 0, (1 << 31) - 1) or 0,
        top_p=fields.number("top_p", 0, 1, 1, above=True),
        min_p=fields.number("min_p", 0, 1, 0),
        repetition_penalty=fields.number("repetition_penalty", 0, 2, 1, above=True),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0),
        logit_bias=_logit_bias(fields.take("logit_bias"), vocab_size),
        seed=secrets.randbits(63) if seed is None else seed,
        logprobs=logprobs,
    )
    stops = _stops(fields.take("stop"))
    stream = fields.flag("stream")
    include_usage = _stream_options(fields.take("stream_options"), stream)
    for name, neutral in _UNSUPPORTED.items():
        value = fields.take(name)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise RequestError("unsupported_parameter", f"{name}: not supported here", param=name)
    for name in _HARMLESS:
        fields.take(name)
    fields.check_empty()
    return GenerationRequest(
        model, messages, prompt, params, max_tokens, stops, stream, include_usage, logprobs
    )  # fmt: skip


class _Fields:
    """The fields of a request not yet taken; null is absent."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in document.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise _type(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, low: int, high: int | None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise _type(name, "an integer", value)
        if value < low or (high is not None and value > high):
            raise _invalid(name, f"{value}: expected {low} or more" + ("" if high is None else f", at most {high}"))
        return value

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _type(name, "a number", value)
        if not low <= value <= high or (above and value == low):
            raise _invalid(name, f"{value}: expected {'above ' if above else ''}{low} to {high}")
        return float(value)

    def check_empty(self) -> None:
        if self._left:
            name = printable(next(iter(self._left)), 60)
            raise RequestError("unknown_parameter", f"{name}: no such parameter", param=name)


def _messages(value: Any) -> list[dict[str, str]]:
    if value is None:
        raise _missing("messages")
    if not isinstance(value, list):
        raise _type("messages", "a list", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise _invalid("messages", f"{len(value)} of them: expected 1 to {MAX_MESSAGES}")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(param: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _type(param, "an object", value)
    role = value.get("role")
    if role in ("tool", "function") or value.get("tool_calls") or value.get("function_call"):
        raise RequestError("unsupported_value", f"{param}: tools are not supported here", param=f"{param}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{param}.role", f"{printable(role, 40)}: expected one of {', '.join(_ROLES)}")
    unknown = set(value) - {"role", "content", "name", "tool_calls", "function_call", "refusal"}
    if unknown:
        name = f"{param}.{printable(min(unknown), 60)}"
        raise RequestError("unknown_parameter", f"{name}: no such parameter", param=name)
    author = value.get("name")
    if author is not None and not isinstance(author, str):
        raise _type(f"{param}.name", "a string", author)
    content = _content(f"{param}.content", value.get("content"))
    # The template gets the name too; most leave it out.
    return {"role": _ROLES[role], "content": content} | ({"name": author} if author else {})


def _content(param: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _type(param, "a string or a list of text parts", value)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                "unsupported_value",
                f"{param}[{i}]: part of type {printable(kind, 40)}: only text is supported here",
                param=f"{param}[{i}]",
            )
        if not isinstance(part.get("text"), str):
            raise _type(f"{param}[{i}].text", "a string", part.get("text"))
        texts.append(part["text"])
    return "".join(texts)


def _prompt(value: Any, vocab_size: int) -> str | list[int]:
    if value is None:
        raise _missing("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(t) is int for t in value):
        wrong = next((t for t in value if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise _invalid("prompt", f"token id {wrong}: expected 0 to {vocab_size - 1}")
        return value
    if isinstance(value, list) and len(value) > 1 and all(isinstance(v, str | list) for v in value):
        raise RequestError("unsupported_value", "prompt: one prompt a request is supported here", param="prompt")
    raise _type("prompt", "a string or a list of token ids", value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise _type("stop", "a string or a list of strings", value)
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"{len(stops)} strings: expected at most {MAX_STOPS}")
    if not all(1 <= len(s) <= MAX_STOP_CHARACTERS for s in stops):
        raise _invalid("stop", f"expected strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _type("logit_bias", "an object of token ids", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise _invalid("logit_bias", f"{len(value)} tokens: expected at most {MAX_LOGIT_BIAS}")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size):
            raise _invalid("logit_bias", f"{printable(key, 40)!r}: expected a token id, 0 to {vocab_size - 1}")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise _invalid("logit_bias", f"of token {key}: expected a number, -100 to 100")
        found[int(key)] = float(bias)
    return found


def _stream_options(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise _type("stream_options", "an object", value)
    if not stream:
        raise _invalid("stream_options", "needs stream to be true")
    fields = _Fields(value)
    usage = fields.flag("include_usage")
    fields.flag("include_obfuscation")
    fields.check_empty()
    return usage


def _missing(param: str) -> RequestError:
    return RequestError("missing_required_parameter", f"{param}: missing", param=param)


def _type(param: str, expected: str, found: Any) -> RequestError:
    kind = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(found), "a number"
    )
    return RequestError("invalid_type", f"{param}: expected {expected}, found {kind}", param=param)


def _invalid(param: str, what: str) -> RequestError:
    return RequestError("invalid_value", f"{param}: {what}", param=param)
