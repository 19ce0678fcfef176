"""`knotctl generate`: the whole pipeline in one process, from a prompt to text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from knotctl.commands.console import print_json, read_text, say
from knotctl.commands.options import (
    IoOption,
    Json,
    KvTypeOption,
    MemoryBudget,
    Model,
    ResidencyOption,
    Threads,
    budget_bytes,
    io_of,
    kv_type_of,
    residency_of,
    spans,
    token_ids,
)
from knotctl.core.errors import UsageError
from knotctl.core.sizes import format_size


def generate(
    knot: Model,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; `-` is stdin.")] = None,
    predict: Annotated[int, typer.Option("--predict", "-n", min=0, help="At most so many tokens.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message: apply the chat template.")] = False,
    special: Annotated[bool, typer.Option("--special", help="Parse special tokens in PROMPT.")] = False,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="IDS", help="The prompt as token ids.")] = None,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample among so many; 0 is all.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample among the likeliest that hold this share.")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the likeliest.")] = 0.0,
    repeat_penalty: Annotated[float, typer.Option("--repeat-penalty", help="Weigh down tokens seen before.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Same seed, same text.")] = 0,
    logprobs: Annotated[int, typer.Option("--logprobs", min=0, max=1000, help="Likeliest tokens a step, in JSON.")] = 0,
    speculate: Annotated[
        bool, typer.Option("--speculate/--no-speculate", help="Verify drafts from the text so far; same output.")
    ] = True,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end of text.")] = False,
    stations: Annotated[
        str, typer.Option("--stations", metavar="A:B,…|N", help="Spans of layers, or a number of stations.")
    ] = "1",
    shards: Annotated[int, typer.Option("--shards", min=1, max=1024, help="Vocabulary shards.")] = 1,
    context: Annotated[int, typer.Option("--ctx-size", "-c", min=1, help="Tokens of prompt and answer.")] = 8192,
    memory_budget: MemoryBudget = None,
    residency: ResidencyOption = "auto",
    io: IoOption = "auto",
    kv_type: KvTypeOption = "f32",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Generate text from a prompt with shards and stations in this process.

    The tokens do not depend on the number of shards, stations or threads, nor on the budget.

    \b
    Examples:
    $ knotctl generate demo.knot --chat "Why is the sky blue?" -n 64
    $ knotctl generate demo.knot "def quicksort(arr):" --stations 0:15,15:30 --shards 8 --json
    """
    from knotctl.commands.warming import warm_kernels
    from knotctl.core.engine.session import Engine, EngineSpec
    from knotctl.core.tokens.chat import encode_chat
    from knotctl.core.tokens.detokenize import Detokenizer
    from knotctl.core.tokens.sampler import SamplingParams

    if (prompt is None) == (tokens is None):
        raise UsageError("usage", "generate: give a PROMPT or --tokens")
    if prompt == "-":
        prompt = read_text("-", 16 << 20)
    params = SamplingParams(
        temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repeat_penalty, seed=seed,
        logprobs=logprobs or None,
    )  # fmt: skip
    spec = EngineSpec(
        shards=shards,
        stations=int(stations) if stations.isdecimal() else spans(stations),
        threads=threads,
        memory_budget=budget_bytes(memory_budget),
        residency=residency_of(residency),
        kv_type=kv_type_of(kv_type),
        io=io_of(io),
        context=context,
        max_batch=1,
        speculate=speculate,
    )
    warm_kernels(knot)
    with Engine.open(knot, spec) as engine:
        tokenizer = engine.tokenizer
        if tokens is not None:
            ids = token_ids(tokens)
        elif chat:
            _, ids = encode_chat(tokenizer, engine.template, [{"role": "user", "content": prompt}])
        else:
            ids = tokenizer.with_bos(tokenizer.encode(prompt or "", special=special))
        stream = engine.submit(ids, params, predict, ignore_stop=ignore_eos)
        detokenizer = Detokenizer(tokenizer)
        text, tops = "", []
        for step in stream:
            piece = detokenizer.push(step.token)
            text += piece
            tops.append([[i, p] for i, p in step.top])
            if not json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        rest = detokenizer.flush()
        drafter = stream.drafter
        stats, timings = engine.stats(), stream.timings.report(len(ids), len(stream.tokens))
    if json:
        print_json(
            {
                "prompt_tokens": ids,
                "tokens": stream.tokens,
                "text": text + rest,
                "finish_reason": stream.finish_reason,
                "logprobs": tops if logprobs else None,
                "timings": timings,
                "speculation": {"drafted": drafter.drafted, "accepted": drafter.accepted},
                "memory": {
                    "peak_weight_bytes": stats["peak_weight_bytes"],
                    "kv_bytes": stats["peak_kv_bytes"],
                    "activation_bytes": stats["activation_bytes"],
                },
            }
        )
        return
    print(rest, flush=True)
    rates = ", ".join(
        f"{name} {value:.1f}{unit}"
        for name, value, unit in (
            ("first token", timings["ttft_ms"], " ms"),
            ("prompt", timings["prompt_tokens_per_s"], " tokens/s"),
            ("decode", timings["decode_tokens_per_s"], " tokens/s"),
        )
        if value is not None
    )
    held = f"at most {format_size(stats['peak_weight_bytes'])} of weights held"
    parts = f"{len(stream.tokens)} tokens", rates, held
    say(f"[{stream.finish_reason}: {'; '.join(part for part in parts if part)}]")
