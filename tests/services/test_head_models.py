"""The API on real models: the official client's answers, streamed and not, are those of `generate`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from knotctl.cli import main
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.services.edge import EdgeConfig
from knotctl.services.head import Head

QUESTIONS = {
    "smollm2": "Explain what a language model is in one sentence. 😀",
    "coder-1.5b": "Write a Python function that reverses a string. Say “fertig” in the end.",
}


@pytest.mark.model
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_chat_answer_is_generate_s_streamed_or_not(
    name: str,
    knot_of: Callable[[str], Path],
    serve_app: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    knot, question = str(knot_of(name)), QUESTIONS[name]
    capsys.readouterr()
    assert main(["generate", knot, question, "--chat", "-n", "24", "--temp", "0", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    fields: Any = {
        "model": name, "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0,
    }  # fmt: skip
    with Engine.open(knot, EngineSpec(shards=8, stations=2, context=1024)) as engine:
        head = Head(engine)
        with (
            serve_app(head.app(EdgeConfig())) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            while httpx2.get(f"{server.url}/readyz").status_code != 200:
                time.sleep(0.1)
            whole = client.chat.completions.create(**fields)
            chunks = list(client.chat.completions.create(**fields, stream=True))
    assert whole.choices[0].message.content == expected["text"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected["text"]
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == expected["finish_reason"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected["prompt_tokens"])
