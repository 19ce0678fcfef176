"""Bytes of an s3://bucket/key object, by boto3 with its usual environment and profiles.

The endpoint is the environment's (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or a profile's); `--endpoint-url` sets it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import boto3
import botocore.loaders
import botocore.session
import urllib3
from botocore import exceptions as boto
from botocore.config import Config

from knotctl.core.errors import SourceError, UsageError, printable
from knotctl.core.source.ranged import Pin, RangedSource, refusal
from knotctl.core.source.retry import Transient

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30
_PIECE = 256 << 10
_REF = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})/(?P<key>.+)", re.DOTALL)


def parse_s3(ref: str) -> tuple[str, str]:
    """Return bucket and key of an s3:// reference. Raises: UsageError `bad-ref`."""
    m = _REF.fullmatch(ref)
    if m is None:
        raise UsageError("bad-ref", f"{printable(ref)}: expected s3://bucket/key")
    return m["bucket"], m["key"]


def open_s3(ref: str) -> RangedSource:
    """Return the open source of an object. Raises: UsageError, SourceError."""
    return RangedSource(ref, S3Store(ref))


def s3_client() -> Any:
    """Return a client by the environment. Raises: SourceError where the environment makes none."""
    try:
        core = botocore.session.get_session()
        core.register_component("data_loader", _loader())
        session = boto3.session.Session(botocore_session=core)
        custom = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
        return session.client(
            "s3",
            region_name=session.region_name or ("us-east-1" if custom else None),
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                # We try again ourselves, with one deadline over all attempts.
                retries={"total_max_attempts": 1, "mode": "standard"},
                max_pool_connections=16,
                # Many stores know no trailing checksums, or send that of the object with a part of it.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"} if custom else {},
            ),
        )
    except (boto.BotoCoreError, ValueError) as e:
        raise SourceError("store-refused", f"s3: {printable(e)}") from e


@cache
def _loader() -> Any:
    """Return the descriptions of the service, which take longer to read than a request takes."""
    return botocore.loaders.create_loader()


class S3Store:
    """One object."""

    def __init__(self, ref: str) -> None:
        self._ref = ref
        self._bucket, self._key = parse_s3(ref)
        self._client = s3_client()

    def get(self, first: int, last: int, pin: Pin | None) -> S3Answer:
        """Return the answer to a GetObject of bytes first..last. Raises: Transient, SourceError."""
        wanted = {"Bucket": self._bucket, "Key": self._key, "Range": f"bytes={first}-{last}"}
        if pin is not None and pin.etag:
            wanted["IfMatch"] = pin.etag
        try:
            return S3Answer(self._client.get_object(**wanted))
        except boto.ClientError as e:
            meta = e.response.get("ResponseMetadata", {})
            status = int(meta.get("HTTPStatusCode", 0))
            headers = {k.lower(): v for k, v in meta.get("HTTPHeaders", {}).items()}
            if status in (412, 416):
                return S3Answer({"ResponseMetadata": meta, "Body": None})
            if e.response.get("Error", {}).get("Code") in ("SlowDown", "RequestTimeout", "InternalError"):
                status = 503
            raise refusal(self._ref, status, headers) from e
        except boto.NoCredentialsError as e:
            raise SourceError(
                "permission-denied",
                f"{printable(self._ref)}: no credentials",
                hint="set AWS_PROFILE or AWS_ACCESS_KEY_ID",
            ) from e
        except (boto.ConnectionError, boto.HTTPClientError) as e:
            raise Transient("unreachable", f"no answer: {printable(e)}") from e
        except boto.BotoCoreError as e:
            raise SourceError("store-refused", f"{printable(self._ref)}: {printable(e)}") from e

    def close(self) -> None:
        """Close connections."""
        self._client.close()


class S3Answer:
    """An answer whose body is still to come."""

    def __init__(self, response: Mapping[str, Any]) -> None:
        meta = response["ResponseMetadata"]
        self._body = response["Body"]
        self.status = int(meta["HTTPStatusCode"])
        self.headers: Mapping[str, str] = {k.lower(): v for k, v in meta["HTTPHeaders"].items()}

    def pieces(self) -> Iterator[bytes]:
        """Yield the body. Raises: Transient."""
        try:
            while piece := self._body.read(_PIECE):
                yield piece
        except (
            boto.ResponseStreamingError,
            boto.IncompleteReadError,
            boto.HTTPClientError,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as e:
            raise Transient("unreachable", f"the connection broke: {printable(e)}") from e

    def close(self) -> None:
        """Give up the rest of the body."""
        if self._body is not None:
            self._body.close()
