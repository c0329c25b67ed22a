"""The files of a repository that serving needs: weights, configuration and tokenizer.

Repositories hold the weights in several formats. Safetensors files are fetched. Files of
`torch.save` are fetched only if there are no safetensors files. Files in folders are not fetched,
because they are other formats of the weights or belong to other programs. The only exception is
`1_Pooling/config.json`, which says how an embedding model pools.
"""

from collections.abc import Mapping
from fnmatch import fnmatch

from services.common.tokenizer_files.find import TOKENIZER_JSON, tokenizer_in

WEIGHTS, PICKLED = "*.safetensors", "pytorch_model*.bin"
"""Patterns of the names of weight files: safetensors, and files of `torch.save`."""

_WANTED = (
    WEIGHTS, PICKLED, "*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "merges.txt",
    "vocab.txt",
)  # fmt: skip
MODULES = "modules.json"
"""Name of a file that embedding models have (in the format of sentence-transformers)."""

POOLING_FOLDER = "1_Pooling"
"""Name of the folder with the file that says how an embedding model pools."""

POOLING = f"{POOLING_FOLDER}/config.json"
"""Path of the file that says how an embedding model pools."""

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""Names of the files that an adapter (LoRA) in PEFT's format has."""

_OTHER_FORM = "consolidated*.safetensors"
"""Pattern of the names of weight files in Mistral's own format. They are a second copy of the
weights."""


def wanted(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the files of a repository that must be fetched, by path, with their sizes in bytes.
    `sizes` has the size of every file of the repository."""
    found = {
        path: size
        for path, size in sizes.items()
        if ("/" not in path and any(fnmatch(path, pattern) for pattern in _WANTED))
        or path == POOLING
    }
    usual = [path for path in found if fnmatch(path, WEIGHTS) and not fnmatch(path, _OTHER_FORM)]
    if usual:
        others = (_OTHER_FORM, PICKLED)
        found = {
            path: size
            for path, size in found.items()
            if not any(fnmatch(path, pattern) for pattern in others)
        }
    return found


def trouble_with(paths: Mapping[str, int]) -> str:
    """Returns a text that names what is missing among the files to fetch, or an empty text if
    nothing is missing. `paths` are the files to fetch. A repository that has only an adapter (LoRA)
    needs no model and no tokenizer."""
    if _ADAPTER[0] in paths and "config.json" not in paths:
        lacking = [name for name in _ADAPTER if name not in paths]
        return f"has no {', no '.join(lacking)} to serve" if lacking else ""
    missing = [] if "config.json" in paths else ["config.json"]
    if tokenizer_in(paths) is None:
        missing.append(TOKENIZER_JSON)
    if not any(_is_weights(path) for path in paths):
        missing.append(f"{WEIGHTS}, no {PICKLED}")
    return f"has no {', no '.join(missing)} to serve" if missing else ""


def _is_weights(path: str) -> bool:
    return fnmatch(path, PICKLED) or (fnmatch(path, WEIGHTS) and not fnmatch(path, _OTHER_FORM))
