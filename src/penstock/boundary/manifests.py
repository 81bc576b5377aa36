"""Manifests: what a folder of files must hold, bit for bit, in JSON that carries a checksum of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from penstock.boundary.files import AnyPath, read_bytes
from penstock.boundary.trees import Bounds, parse_json
from penstock.errors import PenstockError

SEAL: Final = "sha256"
_BOUNDS = Bounds(bytes=1 << 26, values=1 << 21, infinite=True)
"""The seal is verified before the numbers are parsed."""


def sealed(body: Mapping[str, Any]) -> bytes:
    """`body` as the only text that `read_manifest` accepts: canonical JSON with its own sha256."""
    unsealed = {key: value for key, value in body.items() if key != SEAL}
    digest = hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()
    return json.dumps({**unsealed, SEAL: digest}, indent=1, sort_keys=True).encode()


def read_manifest(
    path: AnyPath, where: str, *, error: type[PenstockError], remedy: str = ""
) -> tuple[dict[str, Any], bool]:
    """The table in the manifest `path`, and whether it carries a seal; a seal that is there was verified.

    Raises:
        PenstockError: as `error`: the manifest cannot be read, is not a table, or does not match its seal. The message
            begins with `where`, which names it.
    """
    raw = read_bytes(path, "The manifest", limit=_BOUNDS.bytes, error=error, remedy=remedy)
    body = parse_json(raw, f"{where} is damaged: it", error=error, bounds=_BOUNDS, remedy=remedy)
    if SEAL not in body:
        return body, False
    if sealed(body) != raw:
        raise error(f"{where} is damaged (it does not match its own checksum). {remedy}".rstrip())
    return {name: value for name, value in body.items() if name != SEAL}, True
