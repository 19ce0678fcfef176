"""Bytes of a file on the Hugging Face Hub: hf://org/repo/file, hf://org/repo@revision/folder/file.

Names, tokens (HF_TOKEN, a login) and the endpoint (HF_ENDPOINT) are huggingface_hub's; bytes come by range requests.
"""

from __future__ import annotations

import os
import re

from knotctl.core.errors import SourceError, UsageError, printable
from knotctl.core.source.http import HttpStore
from knotctl.core.source.ranged import RangedSource

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REF = re.compile(
    rf"hf://(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]{{1,100}}?))?/(?P<file>.+)", re.DOTALL
)


def open_hub(ref: str) -> RangedSource:
    """Return the open source of a file on the hub. Raises: UsageError `bad-ref`, SourceError."""
    m = _REF.fullmatch(ref)
    if m is None or ".." in m["file"].split("/"):
        raise UsageError("bad-ref", f"{printable(ref)}: expected hf://org/repo/file or hf://org/repo@revision/file")
    try:
        from huggingface_hub import get_token, hf_hub_url
    except ImportError as e:
        raise UsageError(
            "missing-extra", f"{printable(ref)}: huggingface_hub is not installed", hint="pip install 'knotctl[hf]'"
        ) from e
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise SourceError("offline", f"{printable(ref)}: HF_HUB_OFFLINE is set")
    url = hf_hub_url(m["repo"], m["file"], revision=m["revision"], endpoint=os.environ.get("HF_ENDPOINT"))
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return RangedSource(ref, HttpStore(url, printable(ref, 4096), headers))
