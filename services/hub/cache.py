"""Finds checkpoints in the cache of the hub's library, whose layout other programs also rely on.

    models--ORG--NAME/blobs/SHA256          contents
    models--ORG--NAME/snapshots/COMMIT/     one state of the repository, as links to contents
    models--ORG--NAME/refs/REVISION         the commit that a branch or a tag was

The module does not import the library, which takes long to import.
"""

import re
from pathlib import Path

from services.common import bounded_file
from services.hub.name import HubName
from services.hub.wanted_files import WEIGHTS

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26
_MAX_REF_BYTES = 100
_COMMIT = re.compile(r"[0-9a-f]{40}")


def folder_of(name: HubName, cache: Path) -> Path:
    """Returns the folder of a repository in the cache."""
    return cache / f"models--{name.repository.replace('/', '--')}"


def commit_of(name: HubName, cache: Path) -> str | None:
    """Returns the commit that a name meant when the checkpoint was last fetched into the cache.

    Returns None if the cache does not know the commit.
    """
    if _COMMIT.fullmatch(name.revision):
        return name.revision
    try:
        ref = bounded_file.read_bytes(
            folder_of(name, cache) / "refs" / name.revision, max_bytes=_MAX_REF_BYTES
        )
    except (OSError, ValueError):
        return None
    commit = ref.decode(errors="replace").strip()
    return commit if _COMMIT.fullmatch(commit) else None


def complete_snapshot(name: HubName, cache: Path) -> Path | None:
    """Returns the directory of a checkpoint in the cache; None if any file is missing."""
    commit = commit_of(name, cache)
    if commit is None:
        return None
    snapshot = folder_of(name, cache) / "snapshots" / commit
    there = all((snapshot / file).is_file() for file in ("config.json", "tokenizer.json"))
    return snapshot if there and _has_weights(snapshot) else None


def _has_weights(snapshot: Path) -> bool:
    if not (snapshot / INDEX).is_file():
        return any(path.is_file() for path in snapshot.glob(WEIGHTS))
    try:
        index = bounded_file.read_json_object(snapshot / INDEX, max_bytes=MAX_INDEX_BYTES)
    except (OSError, ValueError):
        return False
    files = index.get("weight_map")
    return isinstance(files, dict) and all(
        (snapshot / str(file)).is_file() for file in set(files.values())
    )
