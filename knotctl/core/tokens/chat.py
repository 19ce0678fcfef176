"""Conversations to prompts: the model's own template under fuel, and its ids with what users typed as plain text.

Source: Hugging Face's `apply_chat_template`, whose functions and settings templates are written for.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minijinja import Environment, TemplateError

from knotctl.core.errors import KnotctlError, ModelError, RequestError, printable
from knotctl.core.tokens.tokenizer import Tokenizer, check_text

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2048
MAX_TEMPLATE = 1 << 20  # characters; the largest known template has 24 thousand
MAX_PROMPT = 1 << 24  # characters
# A step of the template costs 1, a string operation 1 for 16 bytes. Real templates take 250 a message and read each
# content a few times; what is left over bounds a hostile one to a second. (It does not count comparing or indexing
# lists nested into each other by doubling: a model whose template does that hangs.)
_FUEL, _FUEL_MESSAGE, _FUEL_BYTE = 100_000, 1000, 2

# What llama.cpp falls back to for a model without a template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Marks the assistant's words for training; minijinja does not know the tag.
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template, ready to render. Raises: ModelError bad-template."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = CHATML if source is None else source
        if len(self.source) > MAX_TEMPLATE:
            raise ModelError(
                "bad-template", f"chat template: expected at most {MAX_TEMPLATE} characters, found {len(self.source)}"
            )
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._environment(0)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template that came with a tokeniser, ChatML where none did. Raises: ModelError bad-template."""
        bos, eos = ("" if i is None else tokenizer.name(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(tokenizer.chat_template, bos_token=bos, eos_token=eos)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt. The messages must be checked ones.

        Raises: RequestError template-refused, where the template itself refuses the conversation; ModelError
        bad-template, where it fails.
        """
        size = sum(len(m["content"].encode()) for m in messages)
        env = self._environment(_FUEL + _FUEL_MESSAGE * len(messages) + _FUEL_BYTE * size)
        try:
            # copies: a template can append to a list it is given
            prompt = env.render_template(
                "chat",
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except KnotctlError:
            raise
        except Exception as e:
            # Not only TemplateError: our functions, called with what they do not take, raise what Python raises.
            raise _bad_template(e) from None
        if len(prompt) > MAX_PROMPT:
            raise ModelError("bad-template", f"chat template: wrote {len(prompt)} characters, more than {MAX_PROMPT}")
        return prompt

    def _environment(self, fuel: int) -> Environment:
        env = Environment(
            debug=False, fuel=fuel, trim_blocks=True, lstrip_blocks=True, auto_escape_callback=lambda _: False
        )
        env.add_filter("tojson", _to_json)
        env.add_global("strftime_now", _strftime_now)
        env.add_global("raise_exception", _raise_exception)
        try:
            env.add_template("chat", _GENERATION.sub(_no_generation, self.source))
        except TemplateError as e:
            raise _bad_template(e) from None
        return env


def check_messages(messages: object) -> list[dict[str, str]]:
    """Return a conversation as templates take it: role, content and name of each message, all text.

    Fields that are null or empty count as absent, as clients echo them. Raises: RequestError, whose `param` is the
    field at fault.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        found = f"{len(messages)} of them" if isinstance(messages, list) else type(messages).__name__
        raise RequestError(
            "bad-messages", f"messages: expected a list of 1 to {MAX_MESSAGES}, found {found}", param="messages"
        )
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: object, *, add_generation_prompt: bool = True
) -> tuple[str, list[int]]:
    """Return the prompt of a conversation and its ids, bos once where the model wants it.

    The template's markers become control tokens; text of a message that spells one stays plain text.
    Raises: RequestError bad-messages, bad-text, template-refused; ModelError bad-template.
    """
    checked = check_messages(messages)
    guard = _Guard(tokenizer, [template.source, *(text for message in checked for text in message.values())])
    hidden = [{k: v if k == "role" else guard.hide(v) for k, v in message.items()} for message in checked]
    prompt = template.render(hidden, add_generation_prompt=add_generation_prompt)
    parts = tokenizer.control.split(prompt)
    ids = tokenizer.encode_parts(guard.show(part) if isinstance(part, str) else part for part in parts)
    return guard.show(prompt), tokenizer.with_bos(ids)


class _Guard:
    """Hides control tokens' names in messages behind characters that occur nowhere, one for each name.

    To the template they are characters as any other: it may trim and search the text around them.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        taken = {c for text in texts for c in re.findall("[\U000f0000-\U0010ffff]", text)}
        # planes 15 and 16, for private use: no vocabulary has tokens there
        self._free = (c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in taken)
        self._sentinels: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """Return the text without names of control tokens, nor the beginning of one at its end."""
        parts = self._tokenizer.control.split(text)
        shown = [part if isinstance(part, str) else self._sentinel(self._tokenizer.name(part)) for part in parts]
        if parts and isinstance(parts[-1], str):
            cut = self._tokenizer.control.partial_end(parts[-1])
            if cut < len(parts[-1]):
                shown[-1] = parts[-1][:cut] + self._sentinel(parts[-1][cut:])
        return "".join(shown)

    def show(self, text: str) -> str:
        """Return the text with what was hidden in it."""
        return text.translate({ord(sentinel): name for name, sentinel in self._sentinels.items()})

    def _sentinel(self, name: str) -> str:
        if name not in self._sentinels:
            sentinel = next(self._free, None)
            if sentinel is None:
                raise RequestError("bad-text", "messages: every private-use character occurs in them", param="messages")
            self._sentinels[name] = sentinel
        return self._sentinels[name]


def _checked(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _bad_message(where, "an object", message)
    role, content, name = (message.get(key) for key in ("role", "content", "name"))
    if role not in ROLES:
        raise _bad_message(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    if not isinstance(content, str):
        raise _bad_message(f"{where}.content", "a text", content)
    if name is not None and not isinstance(name, str):
        raise _bad_message(f"{where}.name", "a text", name)
    for key, value in message.items():
        if key not in ("role", "content", "name") and value not in (None, [], ""):
            field = f"{where}.{printable(key, 40)}"
            raise RequestError("unsupported", f"{field}: not supported", param=field)
    checked = {"role": role, "content": content} | ({"name": name} if name else {})
    for key, text in checked.items():
        check_text(text, f"{where}.{key}")
    return checked


def _bad_message(where: str, expected: str, found: object) -> KnotctlError:
    shown = printable(repr(found), 60) if isinstance(found, str) else type(found).__name__
    return RequestError("bad-messages", f"{where}: expected {expected}, found {shown}", param=where)


def _bad_template(error: Exception) -> ModelError:
    line = f"line {error.line}: " if isinstance(error, TemplateError) and error.line else ""
    what = (error.detail or error.kind) if isinstance(error, TemplateError) else error
    return ModelError("bad-template", f"chat template: {line}{printable(what)}")


def _raise_exception(message: object) -> NoReturn:
    raise RequestError(
        "template-refused", f"messages: the model's chat template says: {printable(message)}", param="messages"
    )


def _no_generation(tag: re.Match[str]) -> str:
    return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    # minijinja's own filter escapes <, > and & for HTML, which the model was not trained on.
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError(f"tojson: indent {indent}: expected 0 to 16")
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    # Letters alone: strftime would take "%999999999d" at its word and fill the memory.
    if len(pattern) > 64 or not re.fullmatch(r"(?:[^%]|%-?[a-zA-Z%])*", pattern):
        raise ValueError("strftime_now: expected a pattern of letters")
    return datetime.datetime.now().strftime(pattern)
