"""Request-level batching with `transformers`: padded batches write what lone requests do."""

import argparse
from pathlib import Path

import pytest

from benchmarks.peers.protocol import TokenIds
from benchmarks.peers.transformers_static import StaticEngine
from tests.checkpoints import write_checkpoint

REQUESTS = [([5, 17, 101], 4), ([8], 7), ([3, 3, 9, 60, 44], 1), ([190, 2], 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


def engine_of(model: Path, **options: int | None) -> StaticEngine:
    defaults = {"max_batch_size": 16, "microbatch_size": None}
    return StaticEngine(argparse.Namespace(model=model, dtype="fp32", **defaults | options))


def alone(model: Path) -> dict[int, TokenIds]:
    """Returns the tokens of each request when it is served by itself."""
    engine = engine_of(model)
    found: dict[int, TokenIds] = {}
    for index, (prompt, n_output) in enumerate(REQUESTS):
        engine.submit(index, prompt, n_output)
        found |= engine.step()
    return found


@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_a_batch_returns_as_a_whole_and_writes_what_its_requests_do_alone(
    model: Path, microbatch_size: int | None
) -> None:
    engine = engine_of(model, microbatch_size=microbatch_size)
    for index, (prompt, n_output) in enumerate(REQUESTS):
        engine.submit(index, prompt, n_output)

    assert engine.step() == alone(model)


def test_who_has_no_place_in_a_batch_waits_for_the_next(model: Path) -> None:
    engine = engine_of(model, max_batch_size=3)
    for index, (prompt, n_output) in enumerate(REQUESTS):
        engine.submit(index, prompt, n_output)

    assert list(engine.step()) == [0, 1, 2]
    assert list(engine.step()) == [3]
