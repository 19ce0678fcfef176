"""Logs in one format for every service: a line an event on stderr, in words or as JSON, with the request's id.

Texts of requests, tokens and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from knotctl.core.errors import printable


class TextFormat(logging.Formatter):
    """`2026-11-30T08:00:00.123Z INFO station http: POST /forward 200 12.3 ms [req-…]`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and a traceback below it where there is one."""
        request = f" [{i}]" if (i := getattr(record, "request_id", None)) else ""
        line = f"{_time(record)} {record.levelname} {self._service} {_part(record)}: {record.getMessage()}{request}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormat(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message; request_id and traceback where there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; text is escaped to ASCII, so that nothing in it can break the line."""
        document = {
            "time": _time(record), "level": record.levelname, "service": self._service, "logger": _part(record),
            "message": record.getMessage(),
        }  # fmt: skip
        if request_id := getattr(record, "request_id", None):
            document["request_id"] = request_id
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document)


def log_to_stderr(service: str, *, requests: bool, as_json: bool) -> None:
    """Send every log to stderr; `requests` has each request logged, else only what goes wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormat(service) if as_json else TextFormat(service))
    # a full disk or a closed pipe under the log is no reason to stop serving
    logging.raiseExceptions = False
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("knotctl").setLevel(logging.INFO)
    logging.getLogger("knotctl.http").setLevel(logging.INFO if requests else logging.WARNING)


def _part(record: logging.LogRecord) -> str:
    return printable(record.name.removeprefix("knotctl."), 40)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
