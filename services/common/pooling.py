"""How a model turns the hidden states of a prompt into a vector, as workers tell it: one trait.

A worker whose model makes vectors has the trait `pooling`, whose value is the record `Pooling` in
JSON. So all stages of a pipeline pool alike, and schedulers and frontends know from the traits of a
pipeline what it makes of a prompt.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Literal

TRAIT = "pooling"
"""Name of the trait."""

PoolingKind = Literal["last", "mean", "cls"]
"""Type of the ways to make one hidden state of all those of a prompt: the state of its last token,
the mean of all states, or the state of its first token."""

PoolingHead = Literal["none", "classification", "yes-no"]
"""Type of the matrices that may follow: none, a classification head, or the difference of two rows
of the head that makes logits."""


PoolingSetting = Literal["", "last", "mean", "cls", "yes-no"]
"""Type of the setting `pooling`. When it is empty, the files of the checkpoint decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a model turns the hidden states of a prompt, after its last norm, into a vector."""

    kind: PoolingKind
    n_values: int
    """Number of elements of the vector."""
    head: PoolingHead = "none"
    is_normalised: bool = False
    """Whether clients get vectors of length 1. The last stage reports vectors of any length."""
    has_sigmoid: bool = False
    """Whether scores are the logistic function of what the last stage reports."""
    answer_token_ids: tuple[int, ...] = ()
    """With the head `yes-no`, the tokens that stand for yes and for no."""
    generates: bool = False
    """Whether the model also generates tokens."""
    runs_whole: bool = False
    """Whether a prompt must be computed in one iteration, since each of its tokens attends to all
    of them, as in encoders."""
    padding_token_id: int | None = None
    """A token that prompts must not have, since the positions of the tokens behind it depend on it;
    None if there is no such token."""
    token_type_stride: int = 0
    """Difference between the ids of a token in the second text of a pair and in a first text. 0:
    the model does not distinguish them."""

    @property
    def makes_scores(self) -> bool:
        """Whether the vector is a score of a pair of texts, and does not stand for a text."""
        return self.head != "none"

    @property
    def needs_all_states(self) -> bool:
        """Whether the vector depends on hidden states of tokens before the last one, so that the
        whole prompt must be computed."""
        return self.runs_whole or self.kind != "last"

    def to_traits(self) -> dict[str, str]:
        """Returns the trait of a worker that pools like this."""
        return {TRAIT: json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))}


def pooling_in(traits: Mapping[str, str]) -> Pooling | None:
    """Returns how the workers with these traits pool. Returns None if they make no vectors, or if
    they are of a later version that pools in a way which is not known here."""
    value = traits.get(TRAIT)
    return None if value is None else _parsed(value)


@lru_cache(maxsize=64)  # it is needed for each request
def _parsed(value: str) -> Pooling | None:
    record = json.loads(value)
    if not record.keys() <= {field.name for field in fields(Pooling)}:
        return None
    return Pooling(**{**record, "answer_token_ids": tuple(record["answer_token_ids"])})
