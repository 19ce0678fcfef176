"""`knotctl run-station`: a run of layers over a frame, file in and file out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from knotctl.commands.console import print_json, print_table, say
from knotctl.commands.frames import read_frame, write_frame
from knotctl.commands.options import (
    IoOption,
    Json,
    KvTypeOption,
    MemoryBudget,
    Model,
    Threads,
    budget_bytes,
    io_of,
    kv_type_of,
    residency_of,
)
from knotctl.commands.serving import (
    Listen,
    LogJson,
    LogRequests,
    Serve,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UntilEof,
    Warden,
    cluster_token,
    door,
    run_node,
    tls_files,
    trusted,
)  # fmt: skip
from knotctl.commands.signals import sigterm_interrupts
from knotctl.commands.work import check_options, work
from knotctl.core.errors import UsageError
from knotctl.core.sizes import format_size


def run_station(
    knot: Model,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="A:B", help="The layers [A, B) to run; `:` is all.")
    ] = None,
    input: Annotated[
        str | None, typer.Option("--input", "-i", metavar="FRAME", help="Hidden states to run; `-` is stdin.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FRAME", help="Where the result goes.")] = "-",
    logits: Annotated[
        str, typer.Option("--logits", metavar="last|all|none", help="From the last layer: for which tokens.")
    ] = "last",
    kv: Annotated[
        Path | None, typer.Option("--kv", metavar="FILE", help="Keeps this span's keys and values between calls.")
    ] = None,
    memory_budget: MemoryBudget = None,
    residency: Annotated[
        str | None,
        typer.Option(
            "--residency",
            metavar="fluid|pinned|resident|auto",
            help="Which weights stay in memory; unless given, fluid, and with --tracker all.",
        ),
    ] = None,
    io: IoOption = "auto",
    kv_type: KvTypeOption = "f32",
    threads: Threads = None,
    warden: Warden = None,
    head_on_shards: Annotated[
        bool, typer.Option("--head-on-shards", help="The shards make the logits: with the last layer, hold no head.")
    ] = False,
    context: Annotated[
        int, typer.Option("--ctx-size", "-c", min=1, help="With --serve: tokens that all sessions together may hold.")
    ] = 8192,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --serve: the most tokens of a frame.")] = 512,
    tracker: Annotated[
        list[str] | None, typer.Option("--tracker", metavar="URL", help="Serve what this tracker says; again for more.")
    ] = None,
    node_id: Annotated[
        str | None, typer.Option("--node-id", help="With --tracker: its name there, the same at every start.")
    ] = None,
    benchmark: Annotated[
        float | None,
        typer.Option("--benchmark", min=1e-6, max=1e6, help="With --tracker: tokens/s to claim; else measured."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="URL", help="With --tracker: where others reach this worker.")
    ] = None,
    serve: Serve = False,
    listen: Listen = "127.0.0.1:0",
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    until_eof: UntilEof = False,
    log_json: LogJson = False,
    log_requests: LogRequests = False,
    json: Json = False,
) -> None:
    """Run layers A to B of a model over hidden states and write what comes out, or serve that over HTTP.

    A station holds the weights of one phase of one layer at a time (or a row tile of it), unless --residency says
    otherwise. Where B is the last layer, logits come out. With --kv a prompt can be fed in pieces, and decoded step by
    step: each frame's position says where it goes on; what lies beyond it is forgotten.

    With --warden the weights come from a `knotctl warden --layers` of this host where it holds them; on the same
    machine a phase that passes through is multiplied with where it lies in the warden's memory, and none is copied.

    With --tracker the layers are the tracker's to choose: the worker measures itself, registers with what it may hold
    (--memory-budget), loads what it is told, proves it with a probe and serves it; it loads and drops while it serves,
    and on SIGTERM leaves, ends its streams and ends. KNOTCTL_NODE_KEY is its key there, else the token between nodes.

    With --serve the station takes frames, passes them on along their route, and answers with what the last station made
    of them, until SIGTERM or Ctrl-C; with --json one document is printed when it listens: its url, pid, role, knot_id
    and layers.

    \b
    Examples:
    $ knotctl run-station demo.knot --layers 0:15 -i embed.frame -o hidden.frame
    $ knotctl run-station demo.knot --layers 15:30 -i hidden.frame -o logits.frame --logits last --json
    $ knotctl run-station demo.knot --layers 0:15 -i embed.frame -o hidden.frame --memory-budget 64MiB
    $ knotctl run-station demo.knot --layers 0:15 --serve --listen 127.0.0.1:9200 --residency auto
    $ knotctl run-station s3://models/demo.knot --tracker http://127.0.0.1:8000 --memory-budget 2GiB
    """
    from dataclasses import replace

    from knotctl.commands.warming import warm_kernels
    from knotctl.core.kernels.threads import set_threads
    from knotctl.core.knot.reader import Knot, open_knot
    from knotctl.core.model.kv import KvCache
    from knotctl.core.model.station import Station, StationSpec
    from knotctl.core.source.counted import CountedSource
    from knotctl.core.source.opening import open_source
    from knotctl.core.spans import LayerSpan
    from knotctl.core.tensor.warden_source import WardenSource, behind_warden

    started = time.perf_counter()
    check_options(layers, tracker or ())
    if logits not in ("last", "all", "none"):
        raise UsageError("usage", f"--logits {logits}: expected last, all or none")
    if threads is not None:
        set_threads(threads)
    keys, store = cluster_token(token_file), CountedSource(open_source(knot))

    def opened() -> Knot:
        k = open_knot(store)
        if warden is None:
            return k
        try:
            span = LayerSpan.parse(layers or ":", k.header.config.n_layers)
            return behind_warden(k, warden, span, token=keys.own, tls=trusted(tls_ca))
        except BaseException:
            k.close()
            raise

    if tracker:
        tls = tls_files(tls_cert, tls_key)
        with sigterm_interrupts(), door(listen, keys, tls) as at, opened() as k:
            warm_kernels()
            work(
                k, at, tracker, node_id=node_id, memory_budget=budget_bytes(memory_budget),
                residency=residency or "resident",
                kv_type=kv_type, context=context, batch=batch, benchmark=benchmark, tls_ca=tls_ca, advertise=advertise,
                json=json, log_json=log_json, log_requests=log_requests, until_eof=until_eof,
            )  # fmt: skip
        return
    assert layers is not None
    if serve:
        if input is not None or kv is not None:
            raise UsageError("usage", "run-station: with --serve the frames come over HTTP")
        tls = tls_files(tls_cert, tls_key)
        with sigterm_interrupts(), door(listen, keys, tls) as at, opened() as k:
            from knotctl.services.cache_metrics import CacheCollector
            from knotctl.services.station import MAX_LOGITS, StationService

            def make(span: LayerSpan) -> Station:
                spec = StationSpec(
                    span, residency_of(residency or "fluid"), budget_bytes(memory_budget), kv_tokens=context,
                    least_kv_tokens=min(512, context), batch_tokens=batch, logits_rows=MAX_LOGITS,
                    kv_type=kv_type_of(kv_type), io=io_of(io), head=not head_on_shards,
                )  # fmt: skip
                return Station(k, spec)

            warm_kernels()
            span = LayerSpan.parse(layers, k.header.config.n_layers)
            node = StationService(k, make, span, token=keys.own, tls=trusted(tls_ca), batch_tokens=batch)
            levels = [k.source.counts] if isinstance(k.source, WardenSource) else []
            node.metrics.registry.register(CacheCollector(lambda: levels, lambda: store))
            about = {"knot_id": k.id, "layers": [span.start, span.end]}
            run_node(node, at, about, json=json, log_json=log_json, log_requests=log_requests, until_eof=until_eof)
        return
    if input is None:
        raise UsageError("usage", "run-station: give --input FRAME, or --serve")
    if json and output == "-":
        raise UsageError("usage", "run-station: --json prints on stdout, so the frame needs -o FILE")
    frame = read_frame(input)
    with opened() as k:
        ends = {s.request_id: s.position + s.n_tokens for s in frame.segments}
        station = Station(
            k,
            StationSpec(
                LayerSpan.parse(layers, k.header.config.n_layers),
                residency_of(residency or "fluid"),
                budget_bytes(memory_budget),
                kv_tokens=sum(ends.values()),
                batch_tokens=frame.rows,
                logits_rows={"last": len(ends), "all": frame.rows, "none": 0}[logits],
                kv_type=kv_type_of(kv_type),
                io=io_of(io),
                head=not head_on_shards,
            ),
        )
        if kv is not None:
            if len(frame.segments) != 1:
                raise UsageError("usage", f"--kv: the frame has {len(frame.segments)} requests; expected one")
            if kv.exists():
                station.sessions[frame.segments[0].request_id] = KvCache.load(kv, station.kv_shape)
        warm_kernels()
        out = station.forward(replace(frame, meta=dict(frame.meta) | {"logits": logits}))
        out = replace(out, meta={key: value for key, value in out.meta.items() if key != "logits"})
        write_frame(output, out)
        if kv is not None:
            station.sessions[frame.segments[0].request_id].save(kv)
    report = {
        "layers": [station.span.start, station.span.end],
        "role": station.role,
        "tokens": frame.rows,
        "residency": station.plan.residency,
        "budget_bytes": station.plan.budget_bytes,
        "peak_weight_bytes": station.weights.ledger.peak,
        "planned_bytes": station.plan.total_bytes,
        "peak_bytes": station.peak_bytes,
        "phases": [
            {"layer": u.layer, "phase": u.phase, "bytes": u.bytes, "tiles": u.tiles,
             "load_ms": round(u.load_ms, 3), "compute_ms": round(u.compute_ms, 3)}
            for u in station.uses
        ],
        "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip
    if json:
        print_json(report)
    elif output != "-":
        rows = [(f"{p} x {len(u)}", max(x.bytes for x in u), max(x.tiles for x in u),
                 round(sum(x.load_ms for x in u), 1), round(sum(x.compute_ms for x in u), 1))
                for p in dict.fromkeys(x.phase for x in station.uses)
                for u in [[x for x in station.uses if x.phase == p]]]  # fmt: skip
        print_table(("phase", "bytes", "tiles", "load ms", "compute ms"), rows)
        say(
            f"{output}: layers {station.span} ({station.role}) over {frame.rows} tokens in {report['seconds']} s; "
            f"{station.plan.residency}, at most {format_size(station.weights.ledger.peak)} of weights held"
        )
