"""Finds checkpoints in the cache of the hub's library. Other programs also rely on its layout.

    models--ORG--NAME/blobs/SHA256          the contents of a file
    models--ORG--NAME/snapshots/COMMIT/     the files of one commit, as links to contents
    models--ORG--NAME/refs/REVISION         the commit of a branch or a tag when it was last fetched

The module does not import the library, because the import takes a long time.
"""

import re
from pathlib import Path

from services.common import bounded_file
from services.hub.name import HubName
from services.hub.wanted_files import MODULES, POOLING, POOLING_FOLDER, trouble_with

SINGLES = ("model.safetensors", "pytorch_model.bin")
"""Names of files that contain all weights. If the weights are divided among several files, an index
lists these files. The name of the index begins with one of these names."""

MAX_INDEX_BYTES = 1 << 26
_MAX_REF_BYTES = 100
_COMMIT = re.compile(r"[0-9a-f]{40}")


def folder_of(name: HubName, cache: Path) -> Path:
    """Returns the folder of a repository in the cache."""
    return cache / f"models--{name.repository.replace('/', '--')}"


def commit_of(name: HubName, cache: Path) -> str | None:
    """Returns the commit to which a name referred when its checkpoint was last fetched into the
    cache. If the revision in the name is a commit, returns that commit.

    Returns None if the cache has no valid record of the commit.
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
    """Returns the directory of a checkpoint in the cache. Returns None if the checkpoint is not
    there, or if it lacks a file that serving needs."""
    commit = commit_of(name, cache)
    if commit is None:
        return None
    snapshot = folder_of(name, cache) / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    sizes = {path.name: path.stat().st_size for path in snapshot.iterdir() if path.is_file()}
    is_complete = not trouble_with(sizes) and _has_weights(snapshot) and _has_pooling(snapshot)
    return snapshot if is_complete else None


def _has_weights(snapshot: Path) -> bool:
    """Returns whether all weight files are there. If there is an index, its list of files is
    compared with the directory. An index is ignored if a single file with all weights of the same
    format is there. Returns True if there is neither a single file nor an index."""
    for single in SINGLES:
        if (snapshot / single).is_file():
            return True
        index = snapshot / f"{single}.index.json"
        if index.is_file():
            return _has_all(index)
    return True


def _has_pooling(snapshot: Path) -> bool:
    """Returns whether the file that says how an embedding model pools is there. Returns True if no
    module of the model needs the file."""
    modules = snapshot / MODULES
    if not modules.is_file() or (snapshot / POOLING).is_file():
        return True
    try:
        found = bounded_file.read_json(modules, max_bytes=MAX_INDEX_BYTES)
    except (OSError, ValueError):
        return False
    return not isinstance(found, list) or not any(
        isinstance(module, dict) and module.get("path") == POOLING_FOLDER for module in found
    )


def _has_all(path: Path) -> bool:
    try:
        index = bounded_file.read_json_object(path, max_bytes=MAX_INDEX_BYTES)
    except (OSError, ValueError):
        return False
    files = index.get("weight_map")
    return isinstance(files, dict) and all(
        (path.parent / str(file)).is_file() for file in set(files.values())
    )
