"""man/knot-service.5 says what the services do: routes, fields, codes, limits and metrics against the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from knotctl.core.errors import RequestError
from knotctl.services import edge, http_guard, openai_reply, openai_schema
from knotctl.services.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "man" / "knot-service.5").read_text()
SERVICES = ROOT / "knotctl" / "services"


def section(name: str) -> str:
    return re.split(rf"^\.SH {name}$", PAGE, flags=re.M)[1].split("\n.SH ")[0]


def table(text: str) -> list[list[str]]:
    return [line.split("\t") for line in re.findall(r"^\.TS\n.*?\n(.*?)^\.TE", text, re.M | re.S)[0].splitlines()]


def listed(text: str) -> set[str]:
    """The words of `.IR word ,` lines."""
    return set(re.findall(r"^\.IR? (\w+)(?: [,.])?$", text, re.M))


def calls(path: Path) -> list[tuple[str, list[object]]]:
    """Each call's function or method name with its constant arguments (None for others)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found.append((name, [a.value if isinstance(a, ast.Constant) else None for a in node.args]))
    return found


def test_routes() -> None:
    paths = {row[0].split()[1].replace("NAME", "{name:path}") for row in table(section("ENDPOINTS"))}
    made = {args[0] for name, args in calls(SERVICES / "head.py") if name == "Route"}
    assert paths == made


def test_fields() -> None:
    text = section("REQUESTS")
    read = {
        str(args[0])
        for name, args in calls(SERVICES / "openai_schema.py")
        if name in ("take", "flag", "integer", "number") and args and args[0]
    }
    named = {row[0] for row in table(text)[1:]}
    options = {"include_usage", "include_obfuscation"}
    assert named | options == read | {"max_tokens", "max_completion_tokens"}
    assert listed(text.split("change nothing:")[1].split(".PP")[0]) == set(openai_schema._HARMLESS)
    assert listed(text.split("asks for nothing:")[1]) == set(openai_schema._UNSUPPORTED)


def test_values() -> None:
    values = {row[0]: row[1:] for row in table(section("REQUESTS"))[1:]}
    assert values["messages"][0] == f"chat: 1 to {openai_schema.MAX_MESSAGES} of them"
    assert values["stop"][0] == (
        f"up to {openai_schema.MAX_STOPS} strings of 1 to {openai_schema.MAX_STOP_CHARACTERS} characters"
    )
    assert values["max_tokens"][1] == f"the context; completions {openai_schema.COMPLETION_TOKENS}"
    assert values["logit_bias"][0] == f"-100 to 100 for up to {openai_schema.MAX_LOGIT_BIAS} token ids"
    assert values["top_logprobs"][0].endswith(f"0 to {openai_schema.MAX_LOGPROBS}")


def test_ranges_are_those_that_are_kept() -> None:
    checked = 0
    for field, values, *_ in table(section("REQUESTS"))[1:]:
        found = re.search(r"(above )?(-?\d+),? to (-?\d+)", values)
        if found is None or field in ("messages", "stop", "logit_bias", "logprobs"):
            continue
        low, high = int(found[2]), int(found[3])
        inside, outside = ([high], [low, high + 1]) if found[1] else ([low, high], [low - 1, high + 1])
        base = {"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
        for value in inside:
            openai_schema.parse_chat(base | {field: value}, 10)
        for value in outside:
            with pytest.raises(RequestError) as e:
                openai_schema.parse_chat(base | {field: value}, 10)
            assert e.value.param == field
        checked += 1
    assert checked == 8


def test_limits() -> None:
    limits = {row[0]: row[1] for row in table(section("LIMITS"))}
    g = http_guard
    assert limits["head"] == f"{g.HEAD_SECONDS:g} seconds, {g.HEAD_BYTES} bytes, {g.HEAD_FIELDS} fields"
    assert limits["target"] == f"{g.URL_BYTES} bytes"
    assert limits["body"] == f"{edge.BODY_SECONDS:g} seconds, {edge.BODY_BYTES} bytes"
    assert limits["chunked body"].endswith(f"at most {g._CHUNK_OVERHEAD} times the content")
    replies = section("REPLIES")
    assert f"Each {openai_reply.PING_SECONDS:g} seconds" in replies
    assert f"reads nothing for {openai_reply.SEND_SECONDS:g} seconds" in replies
    for path in edge.EdgeConfig().public:
        assert path in section("KEYS")


def test_codes() -> None:
    raised = set()
    for path in SERVICES.glob("*.py"):
        raised |= {str(args[0]) for name, args in calls(path) if name in ("RequestError", "KnotctlError") and args[0]}
    from_elsewhere = {"bad-json", "duplicate-key", "context_length_exceeded", "empty-prompt", "template-refused"}
    from_routing = {"not-found", "method-not-allowed"}
    assert {row[0] for row in table(section("ERRORS"))} == raised | from_elsewhere | from_routing


def test_metrics() -> None:
    stats = {"running": 0, "waiting": 0, "weight_bytes": 0, "peak_weight_bytes": 0, "kv_bytes": 0}
    text = Metrics("m", (), lambda: stats).exposition().decode()
    made = {m for m in re.findall(r"^# TYPE (\S+) ", text, re.M) if not m.endswith("_created")}
    assert set(re.findall(r"^\.B (knot_\w+)$", section("METRICS"), re.M)) == made
