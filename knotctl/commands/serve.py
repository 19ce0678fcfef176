"""`knotctl serve`: OpenAI's API over a model, in one process."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import print_json, progress, say
from knotctl.commands.options import IoOption, Json, MemoryBudget, Threads, budget_bytes, io_of, spans
from knotctl.commands.serve_cluster import (
    DEMO_SHARDS,
    DEMO_STATIONS,
    Processes,
    ShardAt,
    Shards,
    StationAt,
    Stations,
    cluster_engine,
    given_nodes,
    own_processes,
)
from knotctl.commands.serve_tracker import TrackerOptions, serve_tracker
from knotctl.commands.serving import LogJson, LogRequests, TlsCa, TlsCert, TlsKey, TokenFile, tls_files
from knotctl.commands.signals import sigterm_interrupts
from knotctl.core.errors import UsageError
from knotctl.core.sizes import format_size

if TYPE_CHECKING:
    from knotctl.core.engine.session import Engine
    from knotctl.services.demo import Answer
    from knotctl.services.server import Server


def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A knot, or a GGUF, which is encoded into the cache first.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond this machine a key is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 8000,
    alias: Annotated[str | None, typer.Option("--alias", help="The model's name in the API; else its file's.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="API keys, one a line; KNOTCTL_API_KEY holds one more.")
    ] = None,
    shards: Shards = None,
    stations: Stations = None,
    context: Annotated[
        int, typer.Option("--ctx-size", "-c", min=1, help="Tokens that all requests together may hold.")
    ] = 8192,
    memory_budget: MemoryBudget = None,
    residency: Annotated[
        str, typer.Option("--residency", metavar="fluid|pinned|resident|auto", help="Which weights stay in memory.")
    ] = "auto",
    io: IoOption = "auto",
    threads: Threads = None,
    processes: Processes = False,
    wardens: Annotated[
        bool, typer.Option("--wardens", help="With --processes: a row and a layer warden in front of the knot.")
    ] = False,
    shard_at: ShardAt = None,
    station_at: StationAt = None,
    tracker_only: Annotated[
        bool, typer.Option("--tracker-only", help="Serve from workers that register here; no weights in this process.")
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", min=0, max=64, help="As --tracker-only, with so many workers of this machine.")
    ] = 0,
    database: Annotated[
        str | None,
        typer.Option("--database", envvar="KNOTCTL_DATABASE", metavar="URL", help="Tracker: registry and accounts."),
    ] = None,
    api_keys: Annotated[
        bool, typer.Option("--api-keys", help="Tracker: API keys and accounts of the database (knotctl keys, ledger).")
    ] = False,
    heartbeat: Annotated[
        float, typer.Option("--heartbeat", min=0.05, max=60, help="Tracker: seconds between a worker's heartbeats.")
    ] = 2.0,
    monitor: Annotated[
        float, typer.Option("--monitor", min=1, max=3600, help="Tracker: seconds between looks at the whole cluster.")
    ] = 30.0,
    lease: Annotated[
        float, typer.Option("--lease", min=0.5, max=600, help="Tracker: seconds until another one takes its place.")
    ] = 10.0,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="URL", help="Tracker: where other trackers reach this one.")
    ] = None,
    degrade: Annotated[
        bool,
        typer.Option("--degrade", help="Zeros for rows that neither a shard nor the knot has, named in the reply."),
    ] = False,
    head_on_shards: Annotated[
        bool, typer.Option("--head-on-shards", help="Logits by the shards, each of its ids; none by the last station.")
    ] = False,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Fetch a small model, serve it with 8 shards and 2 stations, ask it once.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="With --demo: end after the answer.")] = False,
    log_requests: LogRequests = False,
    log_json: LogJson = False,
    json: Json = False,
) -> None:
    """Serve a model with OpenAI's API.

    /v1/chat/completions, /v1/completions and /v1/models, streamed or not; /livez, /readyz, /health and /metrics.
    What is not supported is refused with its name, never ignored. Ctrl-C or SIGTERM stops taking requests and ends when
    those that run are done, at most 30 seconds later; a second one ends at once.

    With --processes the model runs in 8 shard and 2 station processes, or as many as --shards and --stations say; with
    --shard-at and --station-at, each given once for every shard and station in order, in processes started elsewhere. A
    stream survives the death of any of them, token for token. With --wardens two more processes cache rows and layers
    for them: a knot at a store is fetched once, and the stations share one copy of the weights.

    With --tracker-only workers register here (run-station --tracker), cover the model's layers as the tracker says, and
    serve; requests go to one that has the first layer, over a route that passed a probe. Several trackers may share a
    --database, of which one leads. With --api-keys requests are billed to accounts and their nodes credited.

    With --json one document is printed when the server listens: its url, model, knot_id and pid; with --demo the answer
    too, once it has come.

    \b
    Examples:
    $ knotctl serve --demo
    $ knotctl serve model.gguf --port 8080 --memory-budget 1GiB
    $ knotctl serve model.knot --processes --shards 8 --stations 0:14,14:28
    $ knotctl serve s3://models/model.knot --processes --wardens
    $ knotctl serve s3://models/model.knot --tracker-only --database postgresql://knotctl@db/knotctl --api-keys
    $ KNOTCTL_API_KEY=$(openssl rand -hex 24) knotctl serve model.knot --host 0.0.0.0
    """
    from knotctl.services.keys import check_exposure, load_keys
    from knotctl.services.logs import log_to_stderr
    from knotctl.services.server import bind, url_of

    if demo == (model is not None):
        raise UsageError("usage", "serve: give a MODEL or --demo")
    if once and not demo:
        raise UsageError("usage", "serve: --once goes with --demo")
    elsewhere = bool(shard_at or station_at)
    if processes and elsewhere:
        raise UsageError("usage", "serve: --processes starts its own; --shard-at and --station-at are others")
    if wardens and not processes:
        raise UsageError("usage", "serve: --wardens goes with --processes; others are named at each shard and station")
    keys = load_keys(api_key_file)
    tracks = tracker_only or workers > 0
    if tracks and (processes or elsewhere or demo):
        raise UsageError("usage", "serve: --tracker-only and --workers go with a MODEL alone")
    if api_keys and not tracks:
        raise UsageError("usage", "serve: --api-keys goes with --tracker-only or --workers")
    if not tracks:
        check_exposure(host, keys)
    tls = tls_files(tls_cert, tls_key)
    with sigterm_interrupts(), ExitStack() as stack:
        listener = stack.enter_context(bind(host, port))
        log_to_stderr("tracker" if tracks else "head", requests=log_requests, as_json=log_json)
        knot = _demo_knot() if demo else _knot_of(str(model))
        if tracks:
            options = TrackerOptions(workers, database, api_keys, heartbeat, monitor, lease, advertise)
            budget = [] if memory_budget is None else ["--memory-budget", memory_budget]
            limits = [*budget, "-c", str(context), *(["--threads", str(threads)] if threads else [])]
            serve_tracker(
                knot, listener, host, options, keys, alias=alias, tls=tls, token_file=token_file, tls_ca=tls_ca,
                worker_args=limits, json=json,
            )  # fmt: skip
            return
        many = demo or processes
        n_shards = shards or (DEMO_SHARDS if many else 1)
        parts = stations or str(DEMO_STATIONS if many else 1)
        if processes:
            spec = stack.enter_context(
                own_processes(
                    knot, shards=n_shards, stations=parts, context=context, memory_budget=budget_bytes(memory_budget),
                    residency=residency, threads=threads, degrade=degrade, log_json=log_json, wardens=wardens,
                    io=io, head_on_shards=head_on_shards,
                )
            )  # fmt: skip
            engine = cluster_engine(knot, spec, context)
        elif elsewhere:
            spec = given_nodes(shard_at or [], station_at or [], token_file, tls_ca, degrade=degrade)
            engine = cluster_engine(knot, replace(spec, head_on_shards=head_on_shards), context)
        else:
            engine = _open(knot, n_shards, parts, context, memory_budget, residency, threads, io)
        with engine:
            if alias:
                engine.model_name = alias
            from knotctl.services.edge import EdgeConfig
            from knotctl.services.head import Head
            from knotctl.services.server import Server

            head = Head(engine)
            server = Server(head.app(EdgeConfig(host=host, keys=keys)), on_drain=head.drain, tls=tls)
            url = url_of(listener, tls)
            about = {"url": url, "model": engine.model_name, "knot_id": engine.knot_id, "pid": os.getpid()}
            say(f"knotctl: serving {engine.model_name} at {url} (Ctrl-C ends)")
            if not demo:
                if json:
                    print_json(about)
                server.run_on(listener)
                return
            visitor = _Visitor(server, engine, url, keys.own, once=once, about=about if json else None)
            visitor.start()
            server.run_on(listener)
            visitor.join()
            if visitor.error is not None:
                raise visitor.error


class _Visitor(threading.Thread):
    """Asks the demo's question from a thread of its own: the server has the main one, for its signals."""

    def __init__(
        self, server: Server, engine: Engine, url: str, key: str | None, *, once: bool, about: dict[str, object] | None
    ) -> None:
        super().__init__(name="knotctl-demo", daemon=True)
        self._server, self._engine, self._url, self._key = server, engine, url, key
        self._once, self._about = once, about
        self.error: Exception | None = None

    def run(self) -> None:
        from knotctl.services.demo import QUESTION, ask, wait_until_ready

        try:
            wait_until_ready(self._url, lambda: self._server.should_exit)
            say(f"\n> {QUESTION}")
            answer = ask(self._url, self._engine.model_name, QUESTION, self._key, self._show)
            self._report(answer)
        except Exception as e:
            # Where the server was stopped meanwhile, whatever that broke is no failure.
            self.error = None if self._server.should_exit else e
            self._once = True
        if self._once:
            self._server.stop()

    def _show(self, piece: str) -> None:
        if self._about is None:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def _report(self, answer: Answer) -> None:
        from knotctl.services.demo import QUESTION, lines_to_type

        peak = self._engine.stats()["peak_weight_bytes"]
        if self._about is not None:
            print_json(
                {
                    **self._about,
                    "question": QUESTION,
                    "answer": answer.text,
                    "tokens": answer.n_tokens,
                    "ttft_ms": round(answer.ttft_ms, 1),
                    "tokens_per_s": answer.tokens_per_s and round(answer.tokens_per_s, 2),
                    "peak_weight_bytes": peak,
                }
            )
        else:
            rate = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.1f} tokens/s"
            print(
                f"\n\n[{answer.n_tokens} tokens{rate}, first after {answer.ttft_ms:.0f} ms; "
                f"peak weight bytes {peak} ({format_size(peak)})]",
                flush=True,
            )
        if not self._once:
            say(f"\nGoing on at {self._url}. To talk to it, type:\n\n" + lines_to_type(
                self._url, self._engine.model_name, self._key is not None))  # fmt: skip


def _open(
    knot: str,
    shards: int,
    stations: str,
    context: int,
    memory_budget: str | None,
    residency: str,
    threads: int | None,
    io: str,
) -> Engine:
    """Return the engine over a knot, its kernels compiled before."""
    from knotctl.commands.warming import warm_kernels
    from knotctl.core.engine.session import Engine, EngineSpec
    from knotctl.core.model.budget import Residency

    if residency not in list(Residency):
        raise UsageError("usage", f"--residency {residency}: expected one of {', '.join(Residency)}")
    spec = EngineSpec(
        shards=shards,
        stations=int(stations) if stations.isdecimal() else spans(stations),
        threads=threads,
        memory_budget=budget_bytes(memory_budget),
        residency=Residency(residency),
        context=context,
        io=io_of(io),
    )
    warm_kernels(knot)
    return Engine.open(knot, spec)


def _knot_of(model: str) -> str:
    """Return the path of the model's knot: the model itself, or, of a GGUF, the one in the cache, made if need be."""
    from knotctl.core.magic import MAGIC_BYTES, recognise
    from knotctl.core.source.opening import open_source

    source = open_source(model)
    try:
        is_gguf = recognise(source.read(0, min(MAGIC_BYTES, source.size))) == "GGUF"
    finally:
        source.close()
    return _encoded(model, None) if is_gguf else model


def _demo_knot() -> str:
    """Return the path of the demo model's knot, fetched, encoded and verified before if need be."""
    from knotctl.core.caches import cache_folder
    from knotctl.core.source.demo import DEMO_BYTES, fetch_demo

    with progress("fetch the demo model", DEMO_BYTES) as advance:
        gguf = fetch_demo(cache_folder("models"), advance)
    return _encoded(str(gguf), "demo.knot")


def _encoded(gguf: str, name: str | None) -> str:
    """Return the path of the GGUF's knot in the cache folder, verified, encoded first where it is not there."""
    from knotctl.core.caches import cache_folder
    from knotctl.core.gguf.parts import open_gguf
    from knotctl.core.knot.cached import cached_path, encode_cached, is_whole
    from knotctl.core.knot.from_gguf import work_bytes

    with open_gguf(gguf) as model:
        path = cached_path(model, cache_folder("knots"), name)
        if not is_whole(path):
            say(f"knotctl: encoding {gguf} (once; later starts take it from the cache folder) …")
            with progress(path.name, work_bytes(model)) as advance:
                encode_cached(model, path, advance)
    return str(path)
