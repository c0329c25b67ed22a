"""The files of a repository that serving reads: weights as safetensors, and the files beside them.

Repositories hold the weights in several forms. Older repositories have pickles, which run code when
they are loaded. Files in folders are other forms of the weights, or files for other programs.
"""

from collections.abc import Mapping
from fnmatch import fnmatch

WEIGHTS = "*.safetensors"
_WANTED = (WEIGHTS, "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_OTHER_FORM = "consolidated*.safetensors"
"""Pattern of the names of Mistral's second copy of the weights, which is next to files with the
usual names."""


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
    """Returns a text that names what is missing among the files to fetch; empty if nothing is
    missing."""
    missing = [name for name in ("config.json", "tokenizer.json") if name not in paths]
    if not any(fnmatch(path, WEIGHTS) for path in paths):
        missing.append(WEIGHTS)
    return f"has no {', no '.join(missing)} to serve" if missing else ""
