"""`knotctl serve --tracker-only` and `--workers`: the tracker of a model, alone or with workers of its own."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from knotctl.commands.console import print_json, say
from knotctl.commands.serving import TOKEN_VARIABLE, cluster_token, trusted
from knotctl.core.errors import UsageError

if TYPE_CHECKING:
    from knotctl.services.keys import ApiKeys
    from knotctl.services.server import TlsFiles


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """What `serve` was asked for, as far as a tracker is concerned. Units: seconds."""

    workers: int
    database: str | None
    api_keys: bool
    heartbeat_s: float
    monitor_s: float
    lease_s: float
    advertise: str | None


def serve_tracker(
    knot: str, listener: socket.socket, host: str, options: TrackerOptions, keys: ApiKeys, *, alias: str | None,
    tls: TlsFiles | None, token_file: Path | None, tls_ca: Path | None, worker_args: list[str], json: bool,
) -> None:  # fmt: skip
    """Run the tracker of a model on a listening socket until a signal."""
    from knotctl.core.cluster.apikeys import KeyStore
    from knotctl.core.cluster.credits import Price
    from knotctl.core.cluster.policy import Policy
    from knotctl.core.cluster.registry import REGISTRY
    from knotctl.core.cluster.store import open_database
    from knotctl.core.cluster.tables import LEDGER
    from knotctl.core.knot.layer_bytes import model_layers
    from knotctl.core.knot.reader import open_knot
    from knotctl.services.access import Access
    from knotctl.services.edge import EdgeConfig
    from knotctl.services.gateway import ServedModel
    from knotctl.services.keys import ApiKeys, is_loopback
    from knotctl.services.leadership import TrackerSpec
    from knotctl.services.server import Server, url_of
    from knotctl.services.tracker import Tracker

    if options.api_keys and options.database is None:
        raise UsageError("usage", "serve: --api-keys needs --database, which has them", hint="knotctl keys create")
    token = cluster_token(token_file)
    if not token and options.workers:
        # a token nobody else knows: other users of this machine can reach loopback too
        token = ApiKeys([secrets.token_hex(24)])
    if not is_loopback(host) and not (token and (keys or options.api_keys)):
        raise UsageError(
            "no-api-key", f"{host}: listening beyond this machine needs API keys, and a token between nodes",
            hint=f"--api-keys --database URL (or --api-key-file), and --token-file or {TOKEN_VARIABLE}",
        )  # fmt: skip
    with open_knot(knot) as k:
        name = alias or k.source.name.rsplit("/", 1)[-1].removesuffix(".knot")
        # Nodes name the model by its file.
        model = model_layers(k.header, k.source.name.rsplit("/", 1)[-1].removesuffix(".knot"))
        config = k.header.config
        served = ServedModel(name, k.id, config.vocab_size, config.context_length)
    with ExitStack() as stack:
        ref = options.database or str(Path(stack.enter_context(TemporaryDirectory("knotctl"))) / "tracker.db")
        database = stack.enter_context(open_database(ref, REGISTRY, LEDGER))
        url = options.advertise or url_of(listener, tls)
        spec = TrackerSpec(
            url, Policy(monitor_s=options.monitor_s), options.heartbeat_s, max(6 * options.heartbeat_s, 5.0),
            options.lease_s, token=token.own, tls=trusted(tls_ca),
        )  # fmt: skip
        access = Access(keys, token, KeyStore(database) if options.api_keys else None)
        tracker = Tracker(model, served, database, spec, access, bills=options.api_keys)
        if tracker.gateway.ledger is not None and name not in tracker.gateway.ledger.prices():
            say(f"knotctl: {name} has no price: its requests cost nothing (knotctl ledger price)")
            tracker.gateway.ledger.set_price(name, Price(0, 0))
        server = Server(
            tracker.app(EdgeConfig(host=host, keys=access.edge_keys())), on_drain=tracker.drain, tls=tls
        )  # fmt: skip
        if options.workers:
            stack.enter_context(_own_workers(knot, url, options.workers, token.own, worker_args))
        say(f"knotctl: tracker of {name} at {url} (Ctrl-C ends)")
        if json:
            print_json({"url": url, "model": name, "knot_id": served.knot_id, "pid": os.getpid(), "role": "tracker"})
        sys.stdout.flush()
        server.run_on(listener)


@contextmanager
def _own_workers(knot: str, url: str, count: int, token: str | None, argv: list[str]) -> Iterator[None]:
    """Keep so many workers of this machine running."""
    from knotctl.services.supervisor import Supervisor

    commands = {
        f"worker {i}": ["run-station", knot, "--tracker", url, "--node-id", f"local-{i}", *argv] for i in range(count)
    }
    with Supervisor(commands, {TOKEN_VARIABLE: token} if token else {}):
        yield
