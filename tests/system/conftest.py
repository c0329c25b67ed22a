"""Checkpoints that the system tests serve, and running systems they share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tests.frontend.checkpoints import write_checkpoint as write_tokenizer
from tests.system.stack import Stack, serving

VOCAB_SIZE = 340  # the test tokenizer's
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a system test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


def write_model(directory: Path, **config: Any) -> Path:
    """A random Llama checkpoint with a tokenizer and a chat template."""
    checkpoints.write_checkpoint(directory, **{**MODEL, **config})
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers."""
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def one_stage(model: Path) -> Iterator[Stack]:
    """One stage; shared, so nobody may harm it."""
    with serving(model) as stack:
        yield stack


@pytest.fixture(scope="session")
def two_stages(model: Path) -> Iterator[Stack]:
    """Two stages whose batches hold at most two requests; shared, so nobody may harm it."""
    with serving(model, stages=2, max_batch_size=2) as stack:
        yield stack
