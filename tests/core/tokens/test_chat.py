"""Templates render as Hugging Face's do, hostile ones end soon, and nobody types a control token."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import bpe_keys, spm_keys

from knotctl.core.errors import ModelError, RequestError
from knotctl.core.tokens.chat import CHATML, MAX_MESSAGES, ROLES, ChatTemplate, check_messages, encode_chat
from knotctl.core.tokens.tokenizer import Tokenizer, load_tokenizer

BPE = load_tokenizer(bpe_keys())
HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or HI, **options)


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.name(i) for i in ids if tokenizer.control.split(tokenizer.name(i)) == [i]]


def test_a_model_without_a_template_speaks_chatml() -> None:
    prompt, ids = encode_chat(BPE, ChatTemplate.of(BPE), [{"role": "system", "content": "be"}, *HI])
    assert prompt == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == BPE.encode(prompt, special=True)
    assert controls(BPE, ids) == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    short, _ = encode_chat(BPE, ChatTemplate.of(BPE), HI, add_generation_prompt=False)
    assert short == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "user\n"),
        ("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}", "<s></s>TrueTrue"),
        ("{{ ' a '.strip() }}{{ 'a</t>b'.split('</t>')[-1] }}{{ 'ab'.startswith('a') }}{{ 'A'.lower() }}", "abTruea"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ messages[0].get('x', 'd') }}", "a1d"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% set n = namespace(i=0) %}{% for m in messages[::-1] %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}", "1"),
        ("{{ messages[0]['content'] is string and messages is sequence and messages[0] is mapping }}", "True"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'b': '<é&>', 'a': [1, none]} | tojson(indent=1) }}", '{\n "b": "<é&>",\n "a": [\n  1,\n  null\n ]\n}'),
        ("{{ '<&>' }}", "<&>"),
        ("{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration -%}", "ab"),
        ("{{ undefined_name }}|{{ messages[0].undefined_field }}|{{ messages[9] }}", "||"),
        ("a\n", "a"),
    ],
)  # fmt: skip
def test_templates_find_what_they_are_written_for(source: str, text: str) -> None:
    assert render(source) == text


def test_the_date_is_todays_and_its_pattern_harmless() -> None:
    before = datetime.datetime.now()
    text = render("{{ strftime_now('%d %b %Y, %%') }}")
    assert text in {d.strftime("%d %b %Y, %%") for d in (before, datetime.datetime.now())}
    for pattern in ("%999999999d", "%Ex9" + "y" * 99, "%5"):
        with pytest.raises(ModelError, match="strftime_now"):
            render("{{ strftime_now('" + pattern + "') }}")


def test_what_the_template_refuses_is_the_request_s_fault() -> None:
    with pytest.raises(RequestError, match="the model's chat template says: roles must alternate") as e:
        render("{{ raise_exception('roles must alternate') }}")
    assert (e.value.code, e.value.status, e.value.param) == ("template-refused", 400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% unknown %}",
        "{{ 1 / 0 }}",
        "{{ undefined_name.field }}",
        "{{ undefined_function() }}",
        "{{ raise_exception() }}",
        "{{ raise_exception('a', 'b') }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | tojson(indent='x') }}",
        "{{ strftime_now(5) }}",
        "{% include 'other' %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 2000000000 }}",
        "{{ 'a'.center(2000000000) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% set n = namespace(x='a') %}{% for i in range(9) %}{% set n.x = n.x.replace('a', 'a' * 99) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
    ids=lambda s: s[:40],
)
def test_a_broken_or_hostile_template_is_the_model_s_fault_and_ends_soon(source: str) -> None:
    with pytest.raises(ModelError) as e:
        render(source)
    assert e.value.code == "bad-template" and e.value.message.startswith("chat template: ")


def test_a_template_may_be_long_but_not_endless() -> None:
    with pytest.raises(ModelError, match="at most 1048576 characters, found 1048577"):
        ChatTemplate("x" * ((1 << 20) + 1))


def test_what_a_template_does_to_its_list_stays_there() -> None:
    template = ChatTemplate("{{ messages.append(1) or messages | length }}")
    messages = [dict(m) for m in HI]
    assert [template.render(messages), template.render(messages)] == ["2", "2"] and messages == HI


def test_long_conversations_have_fuel() -> None:
    source = "{% for m in messages %}{{ (m.content | trim).split('</think>')[-1].lstrip() }}{% endfor %}"
    assert len(render(source, [{"role": "user", "content": "x " * 500}] * MAX_MESSAGES)) == 999 * MAX_MESSAGES
    assert len(render(source, [{"role": "user", "content": "日" * 1_000_000}])) == 1_000_000


PARTS = ["<|im_end|>", "<|im_", "end|>", "<", "|>", "<|im_start|>system\n", "<tool>", "hello", " ", "\n", "\U000f0000"]
CONTENTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
TEMPLATES = {
    "chatml": CHATML,
    "trimmed": CHATML.replace("message['content']", "(message['content'] | trim)"),
    # nothing between two contents: one may begin what the next would complete
    "bare": "{% for message in messages %}{{ message['content'] }}{% endfor %}<|im_end|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_nothing_typed_becomes_a_control_token(name: str, contents: list[str]) -> None:
    template = ChatTemplate(TEMPLATES[name])
    messages = [{"role": "user", "content": content} for content in contents]
    prompt, ids = encode_chat(BPE, template, messages)
    harmless = [m | {"content": "hello"} for m in messages]
    assert controls(BPE, ids) == controls(BPE, encode_chat(BPE, template, harmless)[1])
    # the prompt says what was typed, as the template would have it
    assert prompt == template.render(messages)
    assert BPE.decode(ids, special=True) == prompt
    # and where nothing was hidden the ids are those of the whole prompt at once
    if not any("<|im_" in c or c.endswith("<") for c in contents):
        assert ids == BPE.encode(prompt, special=True)


def test_a_conversation_that_uses_up_the_private_characters_is_refused() -> None:
    everything = "".join(map(chr, range(0xF0000, 0x10FFFE)))
    with pytest.raises(RequestError, match="every private-use character"):
        encode_chat(BPE, ChatTemplate(None), [{"role": "user", "content": everything + "<|im_end|>"}])
    prompt, _ = encode_chat(BPE, ChatTemplate(None), [{"role": "user", "content": everything}])
    assert everything in prompt


@pytest.mark.parametrize("source", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_bos_is_there_once_whether_the_template_writes_it_or_not(source: str) -> None:
    tokenizer = load_tokenizer(spm_keys(add_space_prefix=False) | {"tokenizer.chat_template": source})
    _, ids = encode_chat(tokenizer, ChatTemplate.of(tokenizer), [{"role": "user", "content": "hello"}])
    assert [tokenizer.name(i) for i in ids] == ["<s>", "hello"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (HI * (MAX_MESSAGES + 1), "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user\n<|im_end|>", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "messages[0].content"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "a", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_are_none_are_refused_by_their_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError, match=re.escape(param)) as e:
        check_messages(messages)
    assert (e.value.param, e.value.status) == (param, 400)


def test_fields_that_clients_echo_empty_count_as_absent() -> None:
    echoed = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "name": None}
    assert check_messages([echoed]) == [{"role": "assistant", "content": ""}]
    assert check_messages([{"role": r, "content": "a", "name": "b"} for r in ROLES])[0]["name"] == "b"
