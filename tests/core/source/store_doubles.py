"""A server of ours that does one wrong thing at a time, and how other stores are started and filled."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BUCKET = "models"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what the tests are about."""


class FaultyStore:
    """Objects over HTTP and, by path, over S3's GetObject; `faults` are taken one a request, then all goes well."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.sent = 0
        self.validators = True
        self.hang = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def put(self, key: str, data: bytes) -> str:
        self.objects[f"/{BUCKET}/{key}"] = data
        return f"{self.url}/{BUCKET}/{key}"

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(store) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                headers = {k.lower(): v for k, v in self.headers.items()}
                store.requests.append((self.path, headers))
                fault = store.faults.pop(0) if store.faults else ""
                data = store.objects.get(self.path.partition("?")[0])
                if fault.isdecimal():
                    return self.answer(int(fault), b"no", {"Retry-After": "0"} if fault == "503" else {})
                if fault == "redirect":
                    return self.answer(302, b"", {"Location": store.url + self.path})
                if fault == "reset":
                    return self.connection.shutdown(socket.SHUT_RDWR)
                if data is None:
                    return self.answer(404, b"none")
                etag = f'"{hashlib.md5(data).hexdigest()}"'
                if headers.get("if-match", etag) != etag and fault != "ignore-if-match":
                    return self.answer(412, b"")
                about = {"ETag": etag, "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"} if store.validators else {}
                if fault == "weak-etag":
                    about["ETag"] = f"W/{etag}"
                if fault == "wrong-etag":
                    about["ETag"] = '"another"'
                m = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
                if m is None or fault == "ignore-range":
                    return self.answer(200, data, about)
                first, last = int(m[1]), min(int(m[2]), len(data) - 1)
                if first > last:
                    return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                body = data[first : last + 1]
                about["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                if fault == "wrong-range":
                    about["Content-Range"] = f"bytes {first + 1}-{last + 1}/{len(data)}"
                if fault == "wrong-total":
                    about["Content-Range"] = f"bytes {first}-{last}/{len(data) + 1}"
                return self.answer(206, body, about, fault)

            def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, fault: str = "") -> None:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body) + (fault == "long")))
                self.end_headers()
                if fault == "short":
                    self.wfile.write(body[: len(body) // 2])
                    return self.connection.shutdown(socket.SHUT_RDWR)
                if fault == "hang":
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    store.hang.wait(30)
                    return self.connection.shutdown(socket.SHUT_RDWR)
                try:
                    self.wfile.write(body + (b"x" if fault == "long" else b""))
                    store.sent += len(body)
                except OSError:
                    self.close_connection = True
                return None

        return Handler


def point_s3_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is absent (pip install knotctl[test])")
    return found


def serve(command: list[str], port: int) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            assert process.poll() is None, f"{command[0]} ended"
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def put_s3(key: str, data: bytes) -> str:
    """Put an object where s3:// leads, and return its reference."""
    from botocore.exceptions import ClientError

    from knotctl.core.source.s3 import s3_client

    client = s3_client()
    try:
        client.create_bucket(Bucket=BUCKET)
    except ClientError as e:
        assert "BucketAlready" in str(e)
    client.put_object(Bucket=BUCKET, Key=key, Body=data)
    client.close()
    return f"s3://{BUCKET}/{key}"
