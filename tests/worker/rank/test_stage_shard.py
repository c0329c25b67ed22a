"""A rank's weights: how an epoch begins with them, and how much memory they leave. Groups are
real ones; a function that is called again stands in for what a GPU records."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from orcinus.v1 import worker_pb2
from transformers import MistralConfig

from kernels import TORCH
from services.common.cannot_start import CannotStart
from services.worker.engine.decode_graphs import reserved_bytes
from services.worker.rank.data_plane.transport import TransferError, Transport
from services.worker.rank.shard_memory import ShardMemory
from services.worker.rank.stage_shard import StageShard, device_of, has_graphs, join_peers
from tests.checkpoints import SMALL, write_checkpoint, write_family_checkpoint
from tests.worker.engine.fixed_shapes import OPS, RepeatedCall, load_fixed
from tests.worker.engine.plans import prefill
from tests.worker.engine.test_kv_memory import GIB, Memory
from tests.worker.pipeline import load
from tests.worker.rank.data_plane.test_transport import rendezvous, together
from tests.worker.rank.test_started_rank import PROMPT, decode, settings_of


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class Recorder:
    """Gives graphs to the epochs of a shard and remembers them."""

    def __init__(self, on_capture: Callable[[], None] = lambda: None) -> None:
        self.epochs: list[list[RepeatedCall]] = []
        self._on_capture = on_capture

    def new_graphs(self) -> Callable[[], RepeatedCall]:
        epoch: list[RepeatedCall] = []
        self.epochs.append(epoch)

        def new_graph() -> RepeatedCall:
            self._on_capture()
            epoch.append(RepeatedCall())
            return epoch[-1]

        return new_graph


class Ranks:
    """The shards of one stage, which record, and their transports in one epoch."""

    def __init__(self, checkpoint: Path, recorders: Sequence[Recorder], address: str) -> None:
        self._size = len(recorders)
        self._address = address
        self._settings = [
            settings_of(checkpoint, tp_rank=rank, tp_size=self._size, max_graph_batch_size=1)
            for rank in range(self._size)
        ]
        self.shards = [
            StageShard(
                settings,
                load_fixed(checkpoint, tp_rank=settings.tp_rank, tp_size=self._size),
                new_graphs=recorder.new_graphs,
            )
            for settings, recorder in zip(self._settings, recorders, strict=True)
        ]

    def request(self, epoch: int) -> worker_pb2.JoinPipelineRequest:
        return worker_pb2.JoinPipelineRequest(
            pipeline_id="p",
            epoch=epoch,
            members=["x"],
            rendezvous_address=self._address,
            tp_size=self._size,
            n_kv_blocks=8,
        )

    def meet(self, epoch: int) -> list[Transport]:
        request = self.request(epoch)
        return together(
            [functools.partial(join_peers, settings, request) for settings in self._settings]
        )


def test_a_stage_tells_the_windows_of_its_groups(checkpoint: Path, tmp_path: Path) -> None:
    windows = tmp_path / "windows"
    config = MistralConfig(**SMALL, sliding_window=7, head_dim=8)
    for directory, expected in ((write_family_checkpoint(windows, config), [7]), (checkpoint, [])):
        shard = StageShard(settings_of(directory), load(directory))
        described = shard.describe(rendezvous_address="")
        assert list(described.kv_windows) == expected


def test_an_epoch_begins_with_decodes_recorded_and_the_next_one_records_anew(
    checkpoint: Path,
) -> None:
    recorders = [Recorder(), Recorder()]
    with rendezvous() as address:
        ranks = Ranks(checkpoint, recorders, address)
        for epoch in (1, 2):
            peers = ranks.meet(epoch)
            members = together(
                [
                    functools.partial(shard.enter, ranks.request(epoch), mine)
                    for shard, mine in zip(ranks.shards, peers, strict=True)
                ]
            )
            for recorder in recorders:
                assert [len(graphs) for graphs in recorder.epochs] == [1] * epoch

            def iterate(index: int, members: Any = members, epoch: int = epoch) -> None:
                member = members[index]
                for plan in (prefill(PROMPT, epoch=epoch), decode(epoch, token=5)):
                    member.announce(plan)
                    member.start_next()
                assert len(member.take_finished()) == 2

            together([functools.partial(iterate, index) for index in range(2)])
            for recorder in recorders:
                assert [graph.n_replays for graph in recorder.epochs[-1]] == [1], "and no other"
            for member in members:
                member.close()


def test_an_epoch_that_ends_while_ranks_record_is_over_for_all_of_them(checkpoint: Path) -> None:
    recorders = [Recorder(), Recorder(lambda: peers[1].abort())]
    with rendezvous() as address, ThreadPoolExecutor(2) as threads:
        ranks = Ranks(checkpoint, recorders, address)
        peers = ranks.meet(1)
        entering = [
            threads.submit(shard.enter, ranks.request(1), mine)
            for shard, mine in zip(ranks.shards, peers, strict=True)
        ]
        for each, mine in zip(entering, peers, strict=True):
            with pytest.raises(TransferError, match="a rank of this stage does not answer"):
                each.result(10)
            assert not vars(mine).get("pipeline"), "it has let go of its groups"


@pytest.mark.parametrize("is_recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("stage_index", [0, 1])
def test_keys_and_values_have_what_an_iteration_transfers_and_graphs_leave(
    checkpoint: Path, stage_index: int, is_recorded: bool
) -> None:
    settings = settings_of(checkpoint, n_stages=2, stage_index=stage_index, trial_tokens=40)
    settings = settings.model_copy(update={"kv_memory_bytes": None})
    model = load_fixed(checkpoint, stage_index=stage_index, n_stages=2)
    n_results = SMALL["hidden_size"] if stage_index == 0 else SMALL["vocab_size"]
    left = int(80 * GIB * 0.9) - (17 + 3) * GIB - 40 * SMALL["hidden_size"] * 4
    if is_recorded:
        left -= reserved_bytes(settings.max_graph_batch_size, n_results * 4)
    memory = ShardMemory(settings, model, records_graphs=is_recorded)
    assert memory.kv_memory_bytes(lambda: Memory(n_runs=1)) == left


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"data_plane": "gloo"}, False),
        ({"cuda_graphs": False}, False),
    ],
    ids=str,
)
def test_decodes_are_recorded_on_gpus_where_nothing_forbids_it(
    checkpoint: Path, changes: dict[str, Any], expected: bool
) -> None:
    settings = settings_of(checkpoint).model_copy(update={"device": "cuda", **changes})
    assert has_graphs(settings, load_fixed(checkpoint, ops=OPS)) is expected
    assert not has_graphs(settings, load_fixed(checkpoint, ops=TORCH))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(checkpoint: Path) -> None:
    settings = settings_of(checkpoint, device="cuda")
    with pytest.raises(CannotStart, match="device cuda: PyTorch finds no GPU"):
        device_of(settings)
