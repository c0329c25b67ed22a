"""The files of a repository that serving reads: weights as safetensors, and the files beside them.

Repositories hold the same weights in several forms; older ones as pickles, which run code when they
are loaded. Files in folders are other forms of the weights, or for other programs.
"""

from collections.abc import Mapping
from fnmatch import fnmatch

WEIGHTS = "*.safetensors"
_WANTED = (WEIGHTS, "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_OTHER_FORM = "consolidated*.safetensors"
"""Pattern of Mistral's own names for the weights, which stand next to files with the usual
names."""


def wanted(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the files of a repository that are to be fetched, with their sizes."""
    found = {
        path: size
        for path, size in sizes.items()
        if "/" not in path and any(fnmatch(path, pattern) for pattern in _WANTED)
    }
    usual = [path for path in found if fnmatch(path, WEIGHTS) and not fnmatch(path, _OTHER_FORM)]
    if usual:
        found = {path: size for path, size in found.items() if not fnmatch(path, _OTHER_FORM)}
    return found


def trouble_with(paths: Mapping[str, int]) -> str:
    """Returns what is missing among the files that are to be fetched, in words; empty if nothing
    is."""
    missing = [name for name in ("config.json", "tokenizer.json") if name not in paths]
    if not any(fnmatch(path, WEIGHTS) for path in paths):
        missing.append(WEIGHTS)
    return f"has no {', no '.join(missing)} to serve" if missing else ""
