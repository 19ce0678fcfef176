"""`knotctl pull`: fetch a model file and check it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import print_json, progress, say
from knotctl.commands.options import EndpointUrl, Json
from knotctl.core.errors import UsageError

if TYPE_CHECKING:
    from knotctl.core.source.fetch import Fetched


def pull(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="http(s)://, s3:// or hf://org/repo/file; or `demo`, the demo model.")
    ],
    dest: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="Where to put it: a folder or a file name; else in the cache folder."),
    ] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="The digest that it must have.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DEST where it exists.")] = False,
    endpoint_url: EndpointUrl = None,
    json: Json = False,
) -> None:
    """Fetch a model file, check it, and print its path.

    A knot must have its digests, a GGUF be whole, and either the digest that --sha256 names; what is not right does not
    appear. A fetch that is cut off goes on where it was when it is called again, if the object is still the same one.
    What is there already and right is not fetched again.

    \b
    Examples:
    $ knotctl pull demo
    $ knotctl encode "$(knotctl pull demo)" demo.knot
    $ knotctl pull s3://models/demo.knot .
    $ knotctl pull hf://org/repo/model-q4_k_m.gguf models/ --json | jq -r .sha256
    """
    if ref == "demo":
        fetched = _pull_demo(dest, sha256)
    elif "://" in ref:
        fetched = _pull_object(ref, dest, sha256, force=force)
    else:
        raise UsageError(
            "unsupported-ref",
            f"pull: {ref}: expected http(s)://, s3://, hf:// or `demo`",
            hint="what is a path needs no pull",
        )
    if json:
        print_json({"ref": ref, "path": str(fetched.path), "bytes": fetched.size, "sha256": fetched.sha256})
    else:
        print(fetched.path)


def _pull_demo(dest: Path | None, sha256: str | None) -> Fetched:
    from knotctl.core.caches import cache_folder
    from knotctl.core.source.demo import DEMO_BYTES, DEMO_FILE, DEMO_SHA256, fetch_demo
    from knotctl.core.source.fetch import Fetched

    if sha256 is not None and sha256.lower() != DEMO_SHA256:
        raise UsageError("usage", "pull demo: --sha256: the demo model has its own")
    dest = dest or cache_folder("models")
    folder, name = (dest, DEMO_FILE) if dest.is_dir() else (dest.parent, dest.name)
    with progress("pull demo", DEMO_BYTES) as advance:
        path = fetch_demo(folder, advance, name=name)
    return Fetched(path, DEMO_BYTES, DEMO_SHA256, 0)


def _pull_object(ref: str, dest: Path | None, sha256: str | None, *, force: bool) -> Fetched:
    from knotctl.core.caches import cache_folder
    from knotctl.core.knot.sound import check_model_file
    from knotctl.core.sizes import format_size
    from knotctl.core.source.fetch import Fetched, digest_of, fetch_object, file_name, identity_key
    from knotctl.core.source.opening import open_source

    source = open_source(ref)
    try:
        # In the cache a file lies under the identity of its object: what is there is right.
        folder = cache_folder("models", identity_key(source)) if dest is None else dest
        path = folder / file_name(ref) if folder.is_dir() else folder
        if path.is_file() and (sha256 or dest is None) and (found := digest_of(path)) == (sha256 or found).lower():
            return Fetched(path, source.size, found, 0)
        if path.exists() and not (force or dest is None):
            raise UsageError("exists", f"{path}: exists already", hint="--force replaces it")
        with progress(path.name, source.size) as advance:
            fetched = fetch_object(
                source, path, advance, sha256=sha256, check=lambda part: check_model_file(part, source.name)
            )
    finally:
        source.close()
    if fetched.resumed_at:
        say(f"knotctl: {path.name}: went on at {format_size(fetched.resumed_at)} of {format_size(fetched.size)}")
    return fetched
