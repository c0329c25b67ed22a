"""Checkpoints that the system tests serve, and running systems they share.

These are the package's and not the session's: a system that waits for requests takes the time of
the tests beside it, until it is stopped.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.receipts.keys import new_key
from tests import checkpoints
from tests.frontend.checkpoints import write_checkpoint as write_tokenizer
from tests.system.stack import Stack, serving
from tests.trace_receiver import TraceReceiver, trace_receiver

ALL_ITERATIONS_PER_S = 1e6
"""A limit of traced iterations that leaves none out."""

VOCAB_SIZE = 340  # the test tokenizer's
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a system test."""
    for item in items:
        if item.nodeid.startswith("tests/system/"):
            item.add_marker(pytest.mark.system)


def write_model(directory: Path, **config: Any) -> Path:
    """A random Llama checkpoint with a tokenizer and a chat template."""
    checkpoints.write_checkpoint(directory, **{**MODEL, **config})
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers."""
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="package")
def one_stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stage without drafts, whose requests reserve memory for all of `max_tokens`, and which
    makes receipts on request. All tests share the system, so no test may damage it."""
    keys = tmp_path_factory.mktemp("keys") / "keys.pem"
    keys.write_bytes(new_key())
    with serving(
        model,
        dtype="float32",
        scheduler="speculative-tokens=0,admission=reserve",
        receipts="on_request",
        receipt_keys_file=keys,
    ) as stack:
        yield stack


@pytest.fixture(scope="package")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which `two_stages` puts its profiles."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="package")
def receiver() -> Iterator[TraceReceiver]:
    """The receiver of the spans of `two_stages`."""
    with trace_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def two_stages(model: Path, profiles: Path, receiver: TraceReceiver) -> Iterator[Stack]:
    """Two stages that also make vectors and draft nothing, whose batches hold at most two requests
    and whose iterations are all traced; shared, so no test may harm it."""
    with serving(
        model,
        frontend="tool-parser=hermes",
        scheduler="speculative-tokens=0",
        stages=2,
        pooling="mean",
        max_batch_size=2,
        profile_dir=profiles,
        traced_iterations_per_s=ALL_ITERATIONS_PER_S,
        environment=receiver.environment,
    ) as stack:
        yield stack


def tokens(random: Random, n_max: int) -> list[int]:
    """A prompt of random length, without special tokens."""
    return [random.randrange(3, VOCAB_SIZE) for _ in range(random.randint(1, n_max))]


@pytest.fixture(scope="package")
def sampled(one_stage: Stack) -> list[dict[str, Any]]:
    """Sampling options, each with the answer of one stage without other load."""
    random = Random(7)
    options: list[dict[str, Any]] = [
        {
            "prompt": tokens(random, 40),
            "max_tokens": random.randint(4, 20),
            "seed": random.randrange(2**40),
            "ignore_eos": bool(index % 2),
            **extra,
        }
        for index, extra in enumerate(
            3
            * [
                {"temperature": 1.0},
                {"temperature": 0.7, "top_k": 5},
                {"temperature": 1.3, "top_p": 0.8},
                {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
                {"temperature": 0.5, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
            ]
        )
    ]
    return [{**item, "expected": one_stage.complete(**item)["token_ids"]} for item in options]
