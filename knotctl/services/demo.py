"""Asks a served model one question over HTTP, as any client would."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx2

from knotctl.core.errors import SourceError

QUESTION = "Explain what a language model is in one sentence."
_READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `tokens_per_s` counts from the first token, None where there was but one."""

    text: str
    n_prompt: int
    n_tokens: int
    ttft_ms: float
    tokens_per_s: float | None


def wait_until_ready(url: str, stopped: Callable[[], bool]) -> None:
    """Return when the server at the URL is ready. Raises: SourceError not-ready, after two minutes or once stopped."""
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end and not stopped():
        try:
            if httpx2.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
    raise SourceError("not-ready", f"{url}: the server did not get ready")


def ask(url: str, model: str, question: str, key: str | None, show: Callable[[str], None]) -> Answer:
    """Return the model's streamed answer; each piece is shown as it comes.

    Raises: SourceError request-failed.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 256,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"authorization": f"Bearer {key}"} if key else {}
    text, used, first = "", {"prompt_tokens": 0, "completion_tokens": 0}, 0.0
    started = last = time.perf_counter()
    with (
        # Proxies of the environment are for the world outside, not for a server in this very process.
        httpx2.Client(timeout=600, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        if reply.status_code != 200:
            raise SourceError("request-failed", f"{url}: status {reply.status_code}: {reply.read()[:500]!r}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SourceError("request-failed", f"{url}: {chunk['error']['message']}")
            used = chunk.get("usage") or used
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
                    text += piece
                    show(piece)
    n_tokens = used["completion_tokens"]
    rate = (n_tokens - 1) / (last - first) if n_tokens > 1 and last > first else None
    return Answer(text, used["prompt_tokens"], n_tokens, (first - started) * 1e3, rate)


def lines_to_type(url: str, model: str, key: bool) -> str:
    """Return the shell and Python lines that talk to the server."""
    # At OpenAI's default temperature of 1 a model as small as the demo's talks nonsense.
    body = json.dumps(
        {"model": model, "temperature": 0, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    )
    header = ' -H "Authorization: Bearer $KNOTCTL_API_KEY"' if key else ""
    api_key = "os.environ['KNOTCTL_API_KEY']" if key else "'none'"
    return f"""\
curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
  -d '{body}'

pip install openai && python - <<'EOF'
{"import os" + chr(10) if key else ""}from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={api_key})
for chunk in client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "Why is the sky blue?"}}], temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
EOF"""
