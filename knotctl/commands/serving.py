"""What commands that serve share: where to listen, the token between nodes, TLS, logs, and running until the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knotctl.commands.console import print_json, say
from knotctl.core.errors import UsageError

if TYPE_CHECKING:
    import socket
    import ssl

    from knotctl.services.keys import ApiKeys
    from knotctl.services.node import Node
    from knotctl.services.server import TlsFiles

TOKEN_VARIABLE = "KNOTCTL_CLUSTER_TOKEN"

Serve = Annotated[bool, typer.Option("--serve", help="Serve over HTTP instead (man knot-service, NODES).")]
Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="With --serve: where; port 0 is any free one.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"The token between nodes, or {TOKEN_VARIABLE}; needed beyond this machine."),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Logs as a JSON object a line.")]
LogRequests = Annotated[bool, typer.Option("--log-requests", help="Log a line a request, no texts.")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="Certificate (PEM) to serve HTTPS with.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="The certificate's private key (PEM).")]
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", help="Certificates (PEM) to trust in other nodes.")]
Warden = Annotated[
    str | None, typer.Option("--warden", metavar="URL", help="The host's warden, asked before the knot itself.")
]
UntilEof = Annotated[bool, typer.Option("--until-eof", help="End when stdin closes, as it does when its parent ends.")]


@dataclass(frozen=True, slots=True)
class Door:
    """Where a node listens, and who may come in."""

    listener: socket.socket
    host: str
    url: str
    keys: ApiKeys
    tls: TlsFiles | None


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; IPv6 hosts stand in brackets.

    Raises: UsageError bad-address.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError("bad-address", f"{text!r}: expected HOST:PORT, as in 127.0.0.1:9001")
    return host, int(port)


def tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """Return the pair that HTTPS needs, None where neither was given. Raises: UsageError."""
    from knotctl.services.server import TlsFiles

    if (certificate is None) != (key is None):
        raise UsageError("usage", "--tls-cert and --tls-key: give both or neither")
    if certificate is None or key is None:
        return None
    files = TlsFiles(certificate, key)
    files.check()
    return files


def trusted(authority: Path | None) -> ssl.SSLContext | None:
    """Return what a client trusts: the certificates of a file, or (None) the system's. Raises: UsageError bad-tls."""
    if authority is None:
        return None
    from knotctl.services.server import trust

    return trust(authority)


def cluster_token(path: Path | None) -> ApiKeys:
    """Return the token between nodes: of a file (the first line counts for calls to others) or of the environment."""
    from knotctl.services.keys import load_keys

    return load_keys(path, os.environ, TOKEN_VARIABLE)


@contextmanager
def door(listen: str, keys: ApiKeys, tls: TlsFiles | None) -> Iterator[Door]:
    """Listen before anything is loaded, so that what keeps a node from serving is known at once."""
    from knotctl.services.keys import check_exposure
    from knotctl.services.server import bind, url_of

    host, port = split_address(listen)
    check_exposure(host, keys, f"--token-file FILE, or {TOKEN_VARIABLE}; without one use --listen 127.0.0.1:PORT")
    with bind(host, port) as listener:
        yield Door(listener, host, url_of(listener, tls), keys, tls)


def run_node(
    node: Node, at: Door, about: Mapping[str, Any], *, json: bool, log_json: bool, log_requests: bool, until_eof: bool
) -> None:
    """Serve until a signal, or until stdin closes where asked so; tell where, on stdout with --json."""
    from knotctl.services.edge import EdgeConfig
    from knotctl.services.logs import log_to_stderr
    from knotctl.services.server import Server

    log_to_stderr(node.role, requests=log_requests, as_json=log_json)
    server = Server(node.app(EdgeConfig(host=at.host, keys=at.keys)), on_drain=node.drain, tls=at.tls)
    if json:
        print_json({"url": at.url, "pid": os.getpid(), "role": node.role} | dict(about))
    if not log_json:
        say(f"knotctl: {node.role} at {at.url} (Ctrl-C ends)")
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=(server,), name="knotctl-eof", daemon=True).start()
    server.run_on(at.listener)


def _stop_at_eof(server: Any) -> None:
    # not through sys.stdin, whose lock a thread that never returns would hold while the interpreter ends
    while os.read(0, 1 << 16):
        pass
    server.stop()
