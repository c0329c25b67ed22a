"""Determines whether a checkpoint's head uses the embedding's matrix, or has a matrix of its own.

`tie_word_embeddings` says that they are one matrix. Some checkpoints say so and still store a head
with other numbers, for example after a fine-tuning that changed one of the two. The stored head is
then used, as in `transformers` 5. Older versions and other programs use the embedding instead.
"""

from __future__ import annotations

import torch

from services.common.derived import Derived
from services.worker.models.config import ModelConfig
from services.worker.models.registry import FAMILIES
from services.worker.models.tensor_files import TensorFiles
from services.worker.models.weights import pieces

EMBEDDING, OWN = "the embedding's matrix", "a matrix of its own"

_KEY = "tie_word_embeddings"
_NUMBERS = ("weight", "qweight", "weight_packed")  # a head may be quantised


def stored_head(config: ModelConfig, files: TensorFiles) -> Derived[str]:
    """Returns `EMBEDDING` or `OWN`: which matrix turns hidden states into logits.

    Reads both matrices if `config` says that they are one and the files have both.
    """
    if not config.tie_word_embeddings:
        return Derived(OWN, f"{_KEY} is false or left out")
    family = FAMILIES[config.architecture]
    module = family.head_name.removesuffix(".weight")
    names = [files.find(f"{module}.{suffix}") for suffix in _NUMBERS]
    head = next((name for name in names if name is not None), None)
    if head is None:
        return Derived(EMBEDDING, f"{_KEY}, and the files have no {family.head_name}")
    embedding = files.find(family.embedding_name)
    if embedding is not None and _are_equal(files, embedding, head):
        return Derived(EMBEDDING, f"{_KEY}, and {head} is equal to {embedding}")
    return Derived(OWN, f"{head}, which differs from the embedding although {_KEY} is true")


def _are_equal(files: TensorFiles, one: str, other: str) -> bool:
    header = files.header(one)
    if header != files.header(other) or len(header.shape) != 2:
        return False
    n_rows, n_columns = header.shape
    return all(
        torch.equal(
            files.read(one, (range(begin, end), range(n_columns))),
            files.read(other, (range(begin, end), range(n_columns))),
        )
        for begin, end in pieces(n_rows, header.row_bytes)
    )
