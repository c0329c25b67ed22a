"""A whole system of real processes for inputs of the public API and of the scheduler."""

import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.exposition import Samples
from tests.fuzz.rounds import N_INPUTS
from tests.system.conftest import write_model
from tests.system.stack import Stack, serving

SETTLE_S = 20.0
"""Seconds in which everything that clients have left must have ended."""

PROMPT = [5, 6, 7, 8]

CHECKER = "services.frontend.text.grammar_checker"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder that send inputs, and lets each take as long as its inputs
    do."""
    for item in items:
        if item.nodeid.startswith("tests/fuzz/") and item.path.name != "test_messages.py":
            item.add_marker(pytest.mark.fuzz)
            item.add_marker(pytest.mark.timeout(120 + N_INPUTS / 10))


class System:
    """A running system, and the conditions that must hold after any input."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._pids = _lasting_pids(stack)
        self._answer = self._honest_answer()
        self._n_lines = 0

    def check_unharmed(self) -> None:
        """Asserts that nothing is in flight, that no process has ended or logged an error since
        the last time, and that an honest request has the tokens that it had before."""
        deadline = time.monotonic() + SETTLE_S
        while left := self._in_flight():
            assert time.monotonic() < deadline, f"never ended: {left}"
            time.sleep(0.1)
        assert self._honest_answer() == self._answer
        self.stack.look_at_tree()
        assert _lasting_pids(self.stack) == self._pids
        lines = self.stack.output[self._n_lines :]
        self._n_lines += len(lines)
        errors = [line for line in lines if "Traceback" in line or "ERROR" in line]
        assert not errors, "".join(lines[-50:])

    def _honest_answer(self) -> list[int]:
        options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        token_ids: list[int] = self.stack.complete(PROMPT, **options)["token_ids"]
        assert len(token_ids) == 8
        return token_ids

    def _in_flight(self) -> dict[str, float]:
        frontend, scheduler = self.stack.metrics("frontend"), self.stack.metrics("scheduler")
        gauges = {
            name: samples.sum(name)
            for samples, names in (
                (
                    frontend,
                    ("orcinus_frontend_answers_in_flight", "orcinus_frontend_answers_held"),
                ),
                (
                    scheduler,
                    (
                        "orcinus_requests_waiting",
                        "orcinus_requests_running",
                        "orcinus_kv_cache_usage_ratio",
                    ),
                ),
            )
            for name in names
        }
        gauges["accepted and not ended"] = _not_ended(scheduler)
        return {name: value for name, value in gauges.items() if value}


def _lasting_pids(stack: Stack) -> set[int]:
    """Returns the processes that no input may end: the one that checks grammars, and its children,
    come and go."""
    return {process.pid for process in stack.tree if CHECKER not in _command(process)}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return [CHECKER]  # no other ends by itself


def _not_ended(scheduler: Samples) -> float:
    ended = ("finished", "cancelled", "failed", "timed_out")
    return scheduler.sum("orcinus_requests_accepted_total") - sum(
        scheduler.sum(f"orcinus_requests_{name}_total") for name in ended
    )


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system whose model is small and short, so that most of the time goes into inputs. It makes
    vectors, too."""
    model = write_model(
        tmp_path_factory.mktemp("model"), num_hidden_layers=1, max_position_embeddings=64
    )
    with serving(
        model,
        dtype="float32",
        pooling="mean",
        max_batch_size=256,
        metrics=True,
        log_level="ERROR",
    ) as stack:
        yield System(stack)


@pytest.fixture
def unharmed(system: System) -> Iterator[System]:
    """The system, which a test must leave as it found it."""
    yield system
    system.check_unharmed()


@pytest.fixture
def http(system: System) -> Iterator[httpx.Client]:
    """A client of the public HTTP API."""
    with httpx.Client(base_url=system.stack.http, timeout=SETTLE_S) as client:
        yield client
