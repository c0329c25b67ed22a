"""Ranks as they are started, on a CPU: real weights, a real channel and real groups, with
neighbours that leave, say nothing or never come. Each rank is a thread."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from orcinus.v1 import worker_pb2
from torch.distributed import PrefixStore, TCPStore

from services.common.cannot_start import CannotStart
from services.worker.channel import ChannelClosed, MessageKind, RankEnd
from services.worker.rank import __main__ as rank_process
from services.worker.rank.activity import Activity
from services.worker.rank.data_plane.rendezvous import join
from services.worker.rank.data_plane.transport import RankPlace, Transport
from services.worker.settings import PipelinePlace, RankSettings, WorkerSettings
from tests.checkpoints import SMALL, Oracle, write_checkpoint
from tests.limits import HANG_S
from tests.worker.engine.plans import prefill

HOST = "127.0.0.1"
PROMPT = list(range(3, 23))
BLOCK_SIZE = 32


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(name="expected", scope="module")
def generate(checkpoint: Path) -> list[int]:
    """The tokens after the prompt."""
    return Oracle(checkpoint).generate(PROMPT, 2)


def decode(epoch: int, token: int) -> worker_pb2.RunIterationsRequest:
    """One token more, in the same block."""
    return worker_pb2.RunIterationsRequest(
        pipeline_id="p",
        epoch=epoch,
        iteration=2,
        row=[0],
        start_position=[len(PROMPT)],
        n_tokens=[1],
        sample=[True],
        n_new_blocks=[0],
        token_on_rank=[False],
        token_ids=[token],
    )


def settings_of(checkpoint: Path, *, tp_rank: int = 0, **settings: Any) -> RankSettings:
    worker = WorkerSettings(model=checkpoint, block_size=BLOCK_SIZE, **settings)
    return worker.for_rank(tp_rank).at(worker.place or PipelinePlace(0, worker.n_stages))


class StartedRank:
    """A rank that serves in a thread, and the controller's end of its channel."""

    def __init__(self, settings: RankSettings) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._controller = RankEnd(self._ours)
        self.rank = rank_process.start(settings, RankEnd(self._theirs), Activity())
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.progress: list[tuple[int, int]] = []
        self.report: dict[str, str] = {}
        frame = self.read()
        if frame[0] is MessageKind.CHECKPOINT:
            self.report = dict(json.loads(frame[1]))
            frame = self.read()
        while frame[0] is MessageKind.PROGRESS:
            n_done, n_total = frame[1].split()
            self.progress.append((int(n_done), int(n_total)))
            frame = self.read()
        assert frame[0] is MessageKind.LOADED
        self.description = worker_pb2.DescribeResponse.FromString(frame[1])

    def read(self) -> tuple[MessageKind, bytes]:
        frame = self._controller.receive(30)
        assert frame is not None
        return frame

    def result(self) -> list[int]:
        """The tokens of the next frame, which must be a result; timings are passed over."""
        while True:
            kind, payload = self.read()
            assert kind is MessageKind.REPORT
            report = worker_pb2.WatchStageResponse.FromString(payload)
            if report.HasField("result"):
                return list(report.result.token_ids)
            assert report.HasField("timings")

    def send(self, *plans: worker_pb2.RunIterationsRequest) -> None:
        for plan in plans:
            self._controller.send(MessageKind.PLAN, plan.SerializeToString())

    def tell_to_join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        self._controller.send(MessageKind.JOIN, request.SerializeToString())

    def outcome(self) -> tuple[MessageKind, bytes]:
        """Whether it has joined, and what it says to that."""
        while (frame := self.read())[0] is MessageKind.REPORT:
            pass
        return frame

    def end(self) -> None:
        self._ours.close()
        self.rank.membership.leave_before(None)
        self._thread.join(30)
        self._theirs.close()
        assert not self._thread.is_alive()
        self.rank._rendezvous = None  # ends a wait there for other ranks

    def _serve(self) -> None:
        with contextlib.suppress(ChannelClosed):
            self.rank.serve()


class Ranks:
    """All ranks of a pipeline, in their order."""

    def __init__(self, ranks: list[StartedRank], *, tp_size: int) -> None:
        self.all = ranks
        self._tp_size = tp_size

    def __getitem__(self, index: int) -> StartedRank:
        return self.all[index]

    @property
    def address(self) -> str:
        return self.all[0].description.rendezvous_address

    def request(
        self, epoch: int, index: int, n_kv_blocks: int = 4
    ) -> worker_pb2.JoinPipelineRequest:
        return worker_pb2.JoinPipelineRequest(
            pipeline_id="p",
            epoch=epoch,
            stage_index=index // self._tp_size,
            members=["x"] * (len(self.all) // self._tp_size),
            rendezvous_address=self.address,
            tp_size=self._tp_size,
            n_kv_blocks=n_kv_blocks,
        )

    def join(self, epoch: int, n_kv_blocks: int = 4) -> None:
        """Forms an epoch of all."""
        for index, each in enumerate(self.all):
            each.tell_to_join(self.request(epoch, index, n_kv_blocks))
        for each in self.all:
            assert each.outcome() == (MessageKind.JOINED, f"{epoch} ".encode())

    def run(self, *plans: worker_pb2.RunIterationsRequest) -> None:
        for each in self.all:
            each.send(*plans)


@contextlib.contextmanager
def started(checkpoint: Path, *, n_stages: int = 1, tp_size: int = 1) -> Iterator[Ranks]:
    ranks: list[StartedRank] = []
    try:
        for index in range(n_stages * tp_size):
            stage_index, tp_rank = divmod(index, tp_size)
            settings = settings_of(
                checkpoint,
                stage_index=stage_index,
                n_stages=n_stages,
                tp_rank=tp_rank,
                tp_size=tp_size,
                kv_memory=100_000,
            )
            ranks.append(StartedRank(settings))
        yield Ranks(ranks, tp_size=tp_size)
    finally:
        for each in ranks:
            each.end()
        wait_for_entries()  # to end the interpreter under threads inside torch is fatal


def wait_for_entries() -> None:
    """Returns when no rank tries to enter an epoch any more."""
    for thread in threading.enumerate():
        if thread.name.startswith("epoch "):
            thread.join(30)
            assert not thread.is_alive()


def wait_at(address: str, epoch: int, world_rank: int) -> None:
    """Returns when a rank waits for the others of its epoch."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    PrefixStore(f"p/{epoch}", store).wait([f"here/{world_rank}"], timedelta(seconds=30))


def neighbour(address: str, epoch: int, *, stage_index: int) -> Transport:
    """Another stage of two, that has come and not said anything yet."""
    return join(
        RankPlace("p", epoch, stage_index, n_stages=2, tp_rank=0, tp_size=1),
        rendezvous_address=address,
        data_host=HOST,
        device=torch.device("cpu"),
        timeout_s=HANG_S,
    )


def test_ranks_say_how_far_they_are_and_then_what_they_have_loaded(checkpoint: Path) -> None:
    with started(checkpoint, n_stages=2, tp_size=2) as ranks:
        for each in ranks.all:
            n_loaded, n_bytes = each.progress[-1]
            assert n_loaded == n_bytes > 0
        said = [each.description for each in ranks.all]
        reports = [each.report for each in ranks.all]
    assert reports[0]["context"] == "256 (max_position_embeddings)"
    assert reports[1:] == [{}] * 3
    assert [(it.stage_index, it.first_layer, it.n_layers) for it in said] == [
        *[(0, 0, 2)] * 2,
        *[(1, 2, 1)] * 2,
    ]
    # A key and a value of 8 float32 in each slot and layer: of two K/V heads each rank has one.
    assert [it.n_kv_blocks for it in said] == [
        100_000 // (2 * 8 * 4 * BLOCK_SIZE * it.n_layers) for it in said
    ]
    for it in said:
        assert (it.n_stages, it.tp_size, it.block_size) == (2, 2, BLOCK_SIZE)
        assert (it.vocab_size, it.max_model_len) == (199, SMALL["max_position_embeddings"])
        assert (it.model, list(it.eos_token_ids)) == (checkpoint.name, [2])
    assert [bool(it.rendezvous_address) for it in said] == [True, False, False, False]


def test_memory_for_less_than_a_block_is_refused_with_figures(checkpoint: Path) -> None:
    figures = "12287 bytes are less than one block of 32 slots, 12288 bytes"
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(CannotStart, match=figures):
        rank_process.start(settings_of(checkpoint, kv_memory=12287), RankEnd(theirs), Activity())


def test_ranks_compute_the_same_in_every_epoch(checkpoint: Path, expected: list[int]) -> None:
    with started(checkpoint, n_stages=2) as ranks:
        for epoch, n_kv_blocks in ((1, 4), (2, 100), (7, 4)):
            ranks.join(epoch, n_kv_blocks)
            # The same row, and memory that only this epoch has.
            ranks.run(prefill(PROMPT, epoch=epoch, block=n_kv_blocks - 1))
            assert ranks[1].result() == expected[:1]
            ranks.run(decode(epoch, expected[0]))
            assert ranks[1].result() == expected[1:]


def test_of_the_ranks_of_a_stage_the_first_one_reports(
    checkpoint: Path, expected: list[int]
) -> None:
    with started(checkpoint, tp_size=2) as ranks:
        ranks.join(1)
        ranks.run(prefill(PROMPT, epoch=1), decode(1, expected[0]))
        assert ranks[0].result() == expected[:1]
        assert ranks[0].result() == expected[1:], "for which both have finished the one before"
        for index, each in enumerate(ranks.all):
            each.tell_to_join(ranks.request(2, index))
        assert ranks[1].read() == (MessageKind.JOINED, b"2 "), "and nothing before that"


@pytest.mark.parametrize("has_come", [False, True], ids=["never comes", "says nothing"])
def test_an_epoch_is_called_off_while_a_rank_waits_for_another(
    checkpoint: Path, expected: list[int], has_come: bool
) -> None:
    with started(checkpoint, n_stages=2) as ranks:
        ranks[1].tell_to_join(ranks.request(1, 1))
        wait_at(ranks.address, 1, world_rank=1)
        silent = neighbour(ranks.address, 1, stage_index=0) if has_come else None
        ranks[1].rank.membership.leave_before(2)
        assert ranks[1].outcome() == (MessageKind.NOT_JOINED, b"1 epoch 1 is over")
        ranks.join(2)
        ranks.run(prefill(PROMPT, epoch=2))
        assert ranks[1].result() == expected[:1]
        if silent is not None:
            wait_for_entries()  # that in vain has ended, although its neighbour stands by
            silent.close()


def test_an_epoch_is_called_off_while_a_rank_is_in_it(
    checkpoint: Path, expected: list[int]
) -> None:
    with started(checkpoint, n_stages=2) as ranks:
        ranks.join(1)
        ranks[1].send(prefill(PROMPT, epoch=1))  # its activations are never sent
        ranks[1].rank.membership.leave_before(2)
        deadline = time.monotonic() + 30
        while ranks[1].rank.membership.current is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        ranks.join(2)
        ranks.run(prefill(PROMPT, epoch=2))
        assert ranks[1].result() == expected[:1]


def test_a_rank_whose_neighbour_leaves_at_once_says_so_and_joins_the_next_epoch(
    checkpoint: Path, expected: list[int]
) -> None:
    with started(checkpoint, n_stages=2) as ranks:
        ranks[1].tell_to_join(ranks.request(1, 1))
        neighbour(ranks.address, 1, stage_index=0).close()
        kind, reason = ranks[1].outcome()
        assert kind is MessageKind.NOT_JOINED
        # It may have been told of the end while it still connected.
        assert reason.startswith((b"1 nothing from rank 0", b"1 no process group for epoch 1"))
        ranks.join(2)
        ranks.run(prefill(PROMPT, epoch=2))
        assert ranks[1].result() == expected[:1]
