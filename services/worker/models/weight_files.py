"""Finds the files in a checkpoint's directory that hold its weights, and the file of each tensor.

Weights are searched in the order of the `transformers` library: one safetensors file, several
safetensors files with an index, one file of `torch.save`, several such files with an index. If
there is a single file, an index in the same directory is ignored. If several files have no index,
they are opened to find out which tensors they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common import bounded_file
from services.worker.models.tensor_files import CheckpointError, enumerate_problems

SAFETENSORS, PICKLED = ".safetensors", ".bin"
"""Endings of the names of weight files: safetensors, and files of `torch.save`."""

_STEMS = {SAFETENSORS: "model", PICKLED: "pytorch_model"}
_OTHER_FORM = "consolidated*.safetensors"
"""Pattern of the names of weight files in Mistral's own format, whose tensors have other names."""

_MAX_INDEX_BYTES = 1 << 26  # a model with a trillion parameters needs a third of this


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a directory."""

    paths: tuple[Path, ...]
    """All files, in ascending order."""
    by_tensor: Mapping[str, Path] | None = None
    """The file of each tensor according to an index, or None if there is no index to read."""
    index: Path | None = None
    """The path of the index, or None without an index."""


def find_weight_files(directory: Path) -> WeightFiles:
    """Returns the weight files of a checkpoint's directory.

    Raises:
        CheckpointError: there are no weights, or the index is broken.
    """
    for suffix, stem in _STEMS.items():
        single = directory / f"{stem}{suffix}"
        if single.exists():
            return WeightFiles((single,))
        index = directory / f"{single.name}.index.json"
        if index.exists():
            by_tensor = _read_index(index, suffix)
            return WeightFiles(tuple(sorted(set(by_tensor.values()))), by_tensor, index)
        parts = sorted(directory.glob(f"{stem}-*-of-*{suffix}"))
        if parts:
            return WeightFiles(tuple(parts))
    raise CheckpointError(_nothing_in(directory))


def _nothing_in(directory: Path) -> str:
    if any(directory.glob(_OTHER_FORM)):
        return (
            f"{directory} has weights only as {_OTHER_FORM}, whose tensors have other names; "
            "fetch model*.safetensors and config.json of the same repository, or a conversion of "
            "it for transformers"
        )
    return f"{directory} has no model.safetensors or pytorch_model.bin and no index of several"


def _read_index(index: Path, suffix: str) -> dict[str, Path]:
    try:
        contents = bounded_file.read_json_object(index, max_bytes=_MAX_INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    weight_map = contents.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    wrong = [repr(file)[:80] for file in weight_map.values() if not _is_file_name(file, suffix)]
    if wrong:
        raise CheckpointError(f"{index} names {enumerate_problems(wrong)}: no files beside it")
    return {name: index.parent / file for name, file in weight_map.items()}


def _is_file_name(file: object, suffix: str) -> bool:
    """Returns whether an index may name this file. The file must be in the folder of the index.

    Only the name is checked, not the target of a symbolic link, because the cache of the Hugging
    Face hub consists of links.
    """
    return isinstance(file, str) and file.endswith(suffix) and not {"/", "\\", "\0"} & set(file)
