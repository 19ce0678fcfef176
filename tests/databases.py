"""Databases for tests: a private PostgreSQL server of the session, with a schema a test, and SQLite in a file."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from knotctl.core.cluster.store import Database, open_database
from knotctl.core.cluster.tables import LEDGER


class PrivatePostgres:
    """A server of its own in a temporary folder, reached by a socket there; `crash` kills it as a power cut would."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder, self.binaries = folder, binaries
        # PostgreSQL refuses to run as root, as which containers run tests.
        self.user = "postgres" if os.geteuid() == 0 else None
        self.data = folder / "data"
        if self.user:
            account = pwd.getpwnam(self.user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        options = ["-A", "trust", "-U", "knotctl", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run([binaries / "initdb", "-D", self.data, *options])
        self._numbers = itertools.count(1)
        self.start()

    def start(self) -> None:
        # Nothing here outlives the machine, so nothing waits for the disk; a killed server loses nothing by that.
        options = f"-k {self.folder} -c listen_addresses= -c fsync=off -c max_connections=60"
        self._run([self.binaries / "pg_ctl", "-D", self.data, "-w", "-l", self.data / "log", "-o", options, "start"])

    def stop(self, mode: str = "fast") -> None:
        self._run([self.binaries / "pg_ctl", "-D", self.data, "-w", "-m", mode, "stop"])

    def crash(self) -> None:
        """Stop at once, without a word to clients and with recovery at the next start."""
        self.stop("immediate")

    def new_database(self) -> str:
        """The URL of what is as good as a fresh database, and a hundred times as quick: a schema of its own."""
        name = f"test{next(self._numbers)}"
        command = [self.binaries / "psql", "-h", self.folder, "-U", "knotctl", "-q", "-d", "postgres"]
        self._run([*command, "-c", f"CREATE SCHEMA {name}"])
        return f"postgresql://knotctl@/postgres?host={self.folder}&options=-csearch_path%3D{name}"

    def _run(self, command: list[object]) -> None:
        done = subprocess.run(
            [str(c) for c in command], user=self.user, cwd="/", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def _binaries() -> Path:
    """The folder of the server's programs, or a skip; a failure in CI, which installs them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    path = str(found[-1]) if found else shutil.which("initdb")
    if path is None:
        if os.environ.get("CI") or os.environ.get("KNOTCTL_REQUIRE_POSTGRES"):
            pytest.fail("PostgreSQL's server is absent")
        pytest.skip("PostgreSQL's server is absent (.ci/run installs Debian's postgresql)")
    return Path(path).parent


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """A private PostgreSQL server, or a skip."""
    binaries = _binaries()
    # A short path: a socket's may have 107 bytes.
    with TemporaryDirectory(prefix="knotpg", dir="/tmp") as folder:
        server = PrivatePostgres(binaries, Path(folder))
        try:
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> Callable[[], str]:
    """`database_url()` is a fresh, empty database, on each kind of server in turn."""
    if request.param == "postgres":
        server: PrivatePostgres = request.getfixturevalue("postgres")
        return server.new_database
    folder, numbers = request.getfixturevalue("tmp_path"), itertools.count()
    return lambda: f"sqlite:///{folder}/ledger{next(numbers)}.db"


@pytest.fixture
def database(database_url: Callable[[], str]) -> Iterator[Database]:
    """An open database with the ledger's tables, on each kind of server in turn."""
    with open_database(database_url(), LEDGER) as opened:
        yield opened
