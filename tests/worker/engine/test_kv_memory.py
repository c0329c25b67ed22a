"""The memory left for keys and values, and how it is measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kv_memory import MemoryShares, NoMemoryLeft, measure, transfer_bytes
from services.worker.engine.trial_iteration import LoneRank, TrialIteration, trial_lengths
from services.worker.rank.data_plane.transport import MAX_PENDING_SENDS
from tests.checkpoints import write_checkpoint
from tests.worker.pipeline import load

GIB = 1 << 30


@dataclass
class Memory:
    """80 GiB, of which the first iteration takes some for good."""

    n_runs: int = 0
    asked: list[str] = field(default_factory=list)

    def run(self) -> None:
        self.n_runs += 1

    def total(self) -> int:
        return 80 * GIB

    def used(self) -> int:
        self.asked.append(f"used after {self.n_runs}")
        return 17 * GIB if self.n_runs else 16 * GIB

    def peak_of(self, run: Callable[[], None]) -> int:
        self.asked.append(f"peak after {self.n_runs}")
        run()
        return 3 * GIB


def test_the_shares_are_those_after_a_first_iteration() -> None:
    memory = Memory()
    shares = measure(memory, memory.run, transfers=2 * GIB, graphs=GIB)
    assert shares == MemoryShares(
        total=80 * GIB, used=17 * GIB, iteration=3 * GIB, transfers=2 * GIB, graphs=GIB
    )
    assert memory.asked == ["peak after 1", "used after 2"]


def test_keys_and_values_have_what_the_fraction_leaves() -> None:
    shares = MemoryShares(
        total=80 * GIB, used=17 * GIB, iteration=3 * GIB, transfers=2 * GIB, graphs=GIB
    )
    assert shares.kv_memory(0.9) == int(80 * GIB * 0.9) - 23 * GIB


def test_having_none_left_is_said_with_figures_and_settings() -> None:
    shares = MemoryShares(
        total=16 * GIB, used=12 * GIB, iteration=GIB, transfers=GIB // 2, graphs=GIB
    )
    with pytest.raises(NoMemoryLeft) as error:
        shares.kv_memory(0.9)
    for part in ("kv_memory", "device_memory_fraction 0.9", "16.00 GiB", "12.00 GiB", "1.00 GiB"):
        assert part in str(error.value)
    assert "trial_tokens" in str(error.value)
    assert "0.50 GiB" in str(error.value)


@pytest.mark.parametrize(
    ("stage_index", "n_stages", "n_buffers"),
    [(0, 1, 0), (0, 2, 1), (1, 2, 1), (0, 4, 3), (1, 4, 3 + 3), (3, 4, 3), (3, 9, 8 + 4)],
)
def test_hidden_states_on_their_way_are_those_of_the_other_iterations_in_flight(
    stage_index: int, n_stages: int, n_buffers: int
) -> None:
    taken = transfer_bytes(
        GIB, stage_index=stage_index, n_stages=n_stages, max_pending_sends=MAX_PENDING_SENDS
    )
    assert taken == n_buffers * GIB


@given(n_tokens=st.integers(1, 3000), max_model_len=st.integers(1, 1000))
def test_a_trial_has_as_many_tokens_as_it_should_and_no_span_too_long(
    n_tokens: int, max_model_len: int
) -> None:
    lengths = trial_lengths(n_tokens, max_model_len)
    assert sum(lengths) == n_tokens
    assert all(0 < length <= max_model_len for length in lengths)


@pytest.mark.parametrize(("stage_index", "n_stages"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_trial_runs_on_any_rank_by_itself(
    tmp_path: Path, stage_index: int, n_stages: int, tp_size: int
) -> None:
    model = load(
        write_checkpoint(tmp_path),
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=tp_size - 1,
        tp_size=tp_size,
    )
    lengths = trial_lengths(300, model.config.max_position_embeddings)
    trial = TrialIteration(model, lengths, block_size=4)
    for _ in range(2):
        trial.run()


def test_a_lone_rank_has_a_place_among_others() -> None:
    assert (LoneRank(1, 4).rank, LoneRank(1, 4).size) == (1, 4)
