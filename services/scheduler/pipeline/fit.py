"""Checks whether workers fit together, and explains how they differ.

Workers fit together if all their traits are equal: model, checkpoint, element type, block size,
code and others (`services/worker/rank/traits.py`). A *fault* is a reason why this scheduler cannot
use a worker at all, whatever the other workers are.

Workers of one model whose other traits differ are different *builds* of it. Each pipeline has one
build. Pipelines of several builds may serve side by side, for example while a new version replaces
an old one.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

from orcinus.v1 import worker_pb2

from services.common import pooling
from services.common.adapters import is_adapter
from services.common.protocol import MAX_KV_BLOCKS, PROTOCOL

Traits = tuple[tuple[str, str], ...]
"""Names and values of a worker's traits, sorted by name."""

MODEL_TRAITS = frozenset({"model", "checkpoint", "configuration", pooling.TRAIT})
"""Names of the traits that are equal in all builds of a model."""

N_BUILD_DIGITS = 8
"""Number of hexadecimal digits in the name of a build."""

MAX_KV_GROUPS = 16
"""Largest number of K/V groups of a model."""


def traits_of(answer: worker_pb2.DescribeResponse) -> Traits:
    """Returns the traits of a worker: what must be equal in all workers of a pipeline. The result
    is empty if the worker's ranks have not reported the traits yet."""
    return tuple(sorted(answer.traits.items()))


def model_of(traits: Traits) -> Traits:
    """Returns the part of `traits` that is equal in all builds of a model. The adapters belong to
    it, so a request with an adapter may run in each pipeline that serves."""
    return tuple(
        (name, value) for name, value in traits if name in MODEL_TRAITS or is_adapter(name)
    )


def build_of(traits: Traits) -> str:
    """Returns the name of the build with these traits: a digest of all of them."""
    return hashlib.sha256(repr(traits).encode()).hexdigest()[:N_BUILD_DIGITS]


def fault_of(answer: worker_pb2.DescribeResponse, n_stages: int) -> str:
    """Returns the reason why a worker cannot be in any pipeline of `n_stages` stages. The result is
    empty if there is no such reason."""
    if answer.protocol != PROTOCOL:
        return f"protocol {answer.protocol}, not {PROTOCOL}"
    if answer.is_fixed and answer.n_stages != n_stages:
        return f"stage {answer.stage_index} of {answer.n_stages} by its settings, not of {n_stages}"
    return _memory_fault(answer) if answer.state == worker_pb2.WORKER_STATE_READY else ""


def differences(traits: Mapping[str, Traits], fitting: Collection[Traits]) -> dict[str, str]:
    """Returns how each worker that does not fit differs, by its address: `block_size 16, not 32`.

    `traits` are the traits of each worker, by the worker's address. A worker fits if its traits are
    among the `fitting` ones. If `fitting` is empty, every worker is compared with all other
    workers.
    """
    kinds = sorted(set(fitting) or set(traits.values()))
    return {
        address: _difference(own, [kind for kind in kinds if kind != own])
        for address, own in traits.items()
        if (own not in fitting if fitting else len(kinds) > 1)
    }


def _difference(own: Traits, others: Iterable[Traits]) -> str:
    mine, theirs = dict(own), [dict(kind) for kind in others]
    names = sorted(mine.keys() | {name for kind in theirs for name in kind})
    said = []
    for name in names:
        value = mine.get(name, "")
        rest = sorted({kind.get(name, "") for kind in theirs} - {value})
        if rest:
            said.append(f"{name} {value or 'not told'}, not {' or '.join(rest) or 'told'}")
    return "; ".join(said)


def _memory_fault(answer: worker_pb2.DescribeResponse) -> str:
    if not (answer.block_size > 0 and 0 < answer.n_kv_blocks <= MAX_KV_BLOCKS):
        return (
            f"{answer.n_kv_blocks} K/V blocks of {answer.block_size} slots, and from 1 to "
            f"{MAX_KV_BLOCKS} can be accounted for"
        )
    windows = list(answer.kv_windows)
    if len(windows) > MAX_KV_GROUPS or 0 in windows[windows.count(0) :]:
        return f"the windows of its K/V groups are {windows}"
    return ""
