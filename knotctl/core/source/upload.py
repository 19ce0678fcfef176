"""A local file into an s3:// store: whole or not at all, and never over an object that was not to be replaced."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from botocore import exceptions as boto

from knotctl.core.errors import SourceError, UsageError, printable
from knotctl.core.source.base import ByteSource
from knotctl.core.source.file import FileSource
from knotctl.core.source.ranged import refusal
from knotctl.core.source.retry import Transient, with_retries
from knotctl.core.source.s3 import open_s3, parse_s3, s3_client

Advance = Callable[[int], None]

# S3 takes parts of 5 MiB and more, 10,000 of them.
_PART = 16 << 20
_PARTS = 10_000
_JOBS = 4


def check_object(ref: str, *, force: bool) -> None:
    """Refuse an object that exists and must not be replaced, before any work. Raises: UsageError, SourceError."""
    if force:
        parse_s3(ref)
        return
    try:
        open_s3(ref).close()
    except SourceError as e:
        if e.code != "not-found":
            raise
        return
    raise _exists(ref)


def upload_file(path: Path, ref: str, *, force: bool = False, advance: Advance = lambda _: None) -> None:
    """Put a file there as one object; unless `force`, only where there is none.

    The object appears when its last part is in, or not at all: a failed upload is aborted. What lies there afterwards
    is of the file's size and begins as the file does.

    Units: advance gets bytes, from any thread. Raises: UsageError `exists`, SourceError.
    """
    source = FileSource(path)
    try:
        upload = _Upload(source, ref, force, advance)
        upload.whole() if source.size <= _PART else upload.in_parts()
        _check_uploaded(source, ref)
    finally:
        source.close()


class _Upload:
    def __init__(self, source: ByteSource, ref: str, force: bool, advance: Advance) -> None:
        self.source = source
        self.ref = printable(ref, 4096)
        self.client = s3_client()
        bucket, key = parse_s3(ref)
        self.object: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self.condition: dict[str, Any] = {} if force else {"IfNoneMatch": "*"}
        self.advance = advance

    def whole(self) -> None:
        body = self.source.read(0, self.source.size)
        self.call("put_object", Body=body, **self.condition)
        self.advance(len(body))

    def in_parts(self) -> None:
        size = max(_PART, -(-self.source.size // _PARTS))
        upload = self.call("create_multipart_upload")["UploadId"]
        try:
            with ThreadPoolExecutor(_JOBS, thread_name_prefix="knot-upload") as pool:
                jobs = [pool.submit(self.part, upload, at, size) for at in range(0, self.source.size, size)]
                try:
                    parts = [job.result() for job in jobs]
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            self.call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts}, **self.condition)
        except BaseException:
            # Parts of an upload that nobody ends are kept, unseen, and paid for.
            with suppress(SourceError, UsageError):
                self.call("abort_multipart_upload", UploadId=upload)
            raise

    def part(self, upload: str, at: int, size: int) -> dict[str, Any]:
        body = self.source.read(at, min(size, self.source.size - at))
        number = at // size + 1
        answer = self.call("upload_part", UploadId=upload, PartNumber=number, Body=body)
        self.advance(len(body))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def call(self, operation: str, **arguments: Any) -> Any:
        """Return the answer to one request, tried again where that may help. Raises: UsageError, SourceError."""
        return with_retries(self.ref, lambda: self.attempt(operation, arguments))

    def attempt(self, operation: str, arguments: dict[str, Any]) -> Any:
        try:
            return getattr(self.client, operation)(**self.object, **arguments)
        except boto.ClientError as e:
            meta = e.response.get("ResponseMetadata", {})
            status = int(meta.get("HTTPStatusCode", 0))
            if status in (409, 412) and self.condition:
                raise _exists(self.ref) from e
            raise refusal(self.ref, status, meta.get("HTTPHeaders", {})) from e
        except (boto.ConnectionError, boto.HTTPClientError) as e:
            raise Transient("unreachable", f"no answer: {printable(e)}") from e
        except boto.BotoCoreError as e:
            raise SourceError("store-refused", f"{self.ref}: {printable(e)}") from e


def _check_uploaded(source: ByteSource, ref: str) -> None:
    there = open_s3(ref)
    try:
        head = min(source.size, 4096)
        if there.size != source.size or there.read(0, head) != source.read(0, head):
            raise SourceError(
                "not-as-written",
                f"{there.name}: expected the {source.size} bytes that were sent, found other {there.size}",
                hint="another upload may have won; compare with `knotctl verify --read-data`",
            )
    finally:
        there.close()


def _exists(ref: str) -> UsageError:
    return UsageError("exists", f"{printable(ref, 4096)}: exists already", hint="--force replaces it")
