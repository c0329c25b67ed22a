"""Activations between ranks over gloo on loopback: order, epochs, and peers that go away.

Each rank is a thread, which is possible because no group is a global one.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from services.common.address import Address
from services.worker.rank.data_plane import rendezvous as rendezvous_module
from services.worker.rank.data_plane.rendezvous import create_rendezvous
from services.worker.rank.data_plane.rendezvous import join as join_epoch
from services.worker.rank.data_plane.transport import RankPlace, TransferError, Transport
from tests.limits import HANG_S

HOST = "127.0.0.1"
CPU = torch.device("cpu")
T = TypeVar("T")


@contextlib.contextmanager
def rendezvous(host: str = HOST) -> Iterator[str]:
    store: dist.TCPStore = create_rendezvous(host, 0)
    yield str(Address(host, store.port))


def join(
    address: str,
    stage: int,
    n_stages: int,
    *,
    epoch: int = 1,
    timeout_s: float = 60,
    host: str = HOST,
) -> Transport:
    place = RankPlace("p", epoch, stage, n_stages, tp_rank=0, tp_size=1)
    return open_transport(place, address, timeout_s, host=host)


def open_transport(
    place: RankPlace, address: str, timeout_s: float = 60, *, host: str = HOST
) -> Transport:
    opened = join_epoch(
        place, rendezvous_address=address, data_host=host, device=CPU, timeout_s=timeout_s
    )
    opened.warm_up()
    return opened


@contextlib.contextmanager
def pipeline(n_stages: int, *, timeout_s: float = 60) -> Iterator[list[Transport]]:
    with rendezvous() as address:
        stages = together(
            [
                lambda stage=stage: join(address, stage, n_stages, timeout_s=timeout_s)  # type: ignore[misc]
                for stage in range(n_stages)
            ]
        )
        yield stages
        for stage in stages:
            stage.close()


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as threads:
        futures: list[Future[T]] = [threads.submit(call) for call in calls]
        return [future.result(timeout=HANG_S) for future in futures]


def hidden(iteration: int, n_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(n_tokens, 8, generator=generator)


def test_ranks_meet_and_send_by_ipv6() -> None:
    with rendezvous("::1") as address:
        assert address.startswith("[::1]:")
        first, last = together(
            [
                lambda stage=stage: join(address, stage, 2, host="::1")  # type: ignore[misc]
                for stage in range(2)
            ]
        )
        received = torch.empty(3, 8)
        first.send(hidden(1, 3), 1)
        last.start_receive(received, 1).wait()
        assert torch.equal(received, hidden(1, 3))
        first.close()
        last.close()


def test_stages_of_two_families_are_named_at_once() -> None:
    with (
        rendezvous("::1") as address,
        pytest.raises(TransferError, match=r"data_host is 127\.0\.0\.1 here and ::1 on stage 0"),
    ):
        join(address, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_arrive_in_order_and_unchanged(dtype: torch.dtype) -> None:
    sizes = [1, 7, 3, 33, 1, 2, 5, 64]

    def first(stage: Transport) -> list[torch.Tensor]:
        for iteration, n_tokens in enumerate(sizes, 1):
            stage.send(hidden(iteration, n_tokens).to(dtype), iteration)
        return []

    def middle(stage: Transport) -> list[torch.Tensor]:
        for iteration, n_tokens in enumerate(sizes, 1):
            received = torch.empty(n_tokens, 8, dtype=dtype)
            stage.start_receive(received, iteration).wait()
            stage.send(received * 2, iteration)
        return []

    def last(stage: Transport) -> list[torch.Tensor]:
        results = []
        for iteration, n_tokens in enumerate(sizes, 1):
            received = torch.empty(n_tokens, 8, dtype=dtype)
            stage.start_receive(received, iteration).wait()
            results.append(received)
        return results

    with pipeline(3) as (a, b, c):
        *_, results = together([lambda: first(a), lambda: middle(b), lambda: last(c)])
    for iteration, (n_tokens, result) in enumerate(zip(sizes, results, strict=True), 1):
        assert torch.equal(result, hidden(iteration, n_tokens).to(dtype) * 2)


def test_a_receive_started_early_is_filled_while_nobody_waits_for_it() -> None:
    with pipeline(2) as (first, second):
        hidden_states = [torch.zeros(4, 8) for _ in range(3)]
        receipts = [second.start_receive(h, i) for i, h in enumerate(hidden_states, 1)]
        for iteration in range(1, 4):
            first.send(hidden(iteration, 4), iteration)
        deadline = time.monotonic() + 30
        while not hidden_states[2].any():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for iteration, receipt in enumerate(receipts, 1):
            receipt.wait()
            torch.testing.assert_close(hidden_states[iteration - 1], hidden(iteration, 4))


def test_the_ranks_of_a_stage_sum_and_gather_among_themselves() -> None:
    def work(address: str, stage: int, tp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = RankPlace("p", 1, stage, n_stages=2, tp_rank=tp_rank, tp_size=3)
        transport_ = open_transport(place, address)
        group = transport_.tensor_parallel
        assert (group.rank, group.size) == (tp_rank, 3)
        mine = torch.full((2, 1), float(10 * stage + tp_rank))
        gathered = group.all_gather(mine)
        group.all_reduce(mine)
        transport_.close()
        return mine, gathered

    with rendezvous() as address:
        calls = [
            functools.partial(work, address, stage, tp_rank)
            for stage in range(2)
            for tp_rank in range(3)
        ]
        results = together(calls)
    for index, (total, gathered) in enumerate(results):
        ranks = [10 * (index // 3) + tp_rank for tp_rank in range(3)]
        assert total.eq(sum(ranks)).all()
        assert gathered.tolist() == [ranks, ranks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_in_the_order_of_the_ranks_whatever_their_shape(dtype: torch.dtype) -> None:
    size = 4
    generator = torch.Generator().manual_seed(1)
    parts = (torch.randn(size, 31, 5, generator=generator) * 100).to(dtype)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    rows = [list(range(31)), [7], [30, 2, 11]]

    def work(address: str, tp_rank: int) -> list[torch.Tensor]:
        place = RankPlace("p", 1, 0, n_stages=1, tp_rank=tp_rank, tp_size=size)
        transport_ = open_transport(place, address)
        totals = [parts[tp_rank][some].clone() for some in rows]
        for total in totals:
            transport_.tensor_parallel.all_reduce(total)
        transport_.close()
        return totals

    with rendezvous() as address:
        results = together([functools.partial(work, address, i) for i in range(size)])
    for totals in results:
        for some, total in zip(rows, totals, strict=True):
            assert torch.equal(total, expected[some])


def test_a_send_does_not_wait_for_the_receiver() -> None:
    with pipeline(2) as (first, second):
        for iteration in range(1, 4):
            first.send(hidden(iteration, 4), iteration)  # the second rank does not receive yet
        received = torch.empty(4, 8)
        for iteration in range(1, 4):
            second.start_receive(received, iteration).wait()
            torch.testing.assert_close(received, hidden(iteration, 4))


def test_epochs_on_one_store_do_not_mix() -> None:
    with rendezvous() as address:
        old = together([lambda: join(address, 0, 2, epoch=1), lambda: join(address, 1, 2, epoch=1)])
        new = together([lambda: join(address, 0, 2, epoch=2), lambda: join(address, 1, 2, epoch=2)])
        old[0].send(torch.zeros(2, 8), 1)
        new[0].send(torch.ones(2, 8), 1)
        received = torch.empty(2, 8)
        new[1].start_receive(received, 1).wait()
        assert received.eq(1).all()
        for stage in (*old, *new):
            stage.close()


def test_a_receiver_learns_at_once_that_its_peer_has_left() -> None:
    with pipeline(2, timeout_s=HANG_S) as stages, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stages[1].start_receive(torch.empty(1, 8), 1).wait)
        stages.pop(0).close()
        with pytest.raises(TransferError):
            waiting.result(timeout=HANG_S)


def test_a_receiver_gives_up_on_a_silent_peer() -> None:
    with pipeline(2, timeout_s=2) as (_, second), pytest.raises(TransferError):
        second.start_receive(torch.empty(1, 8), 1).wait()


@pytest.mark.parametrize("waits_for", ["receive", "send", "reduce"])
def test_what_waits_for_a_silent_peer_is_called_off_at_once(waits_for: str) -> None:
    n_stages, tp_size = (1, 2) if waits_for == "reduce" else (3, 1)

    def work(mine: Transport) -> None:
        if waits_for == "reduce":
            mine.tensor_parallel.all_reduce(torch.zeros(8))
        elif waits_for == "receive":
            mine.start_receive(torch.empty(8), 1).wait()
        else:
            for iteration in range(1, 10):
                mine.send(torch.empty(1 << 22), iteration)  # more than sockets hold

    with rendezvous() as address, ThreadPoolExecutor(1) as threads:
        places = [
            RankPlace("p", 1, stage, n_stages, tp_rank, tp_size)
            for stage in range(n_stages)
            for tp_rank in range(tp_size)
        ]
        calls = [functools.partial(open_transport, place, address, 60) for place in places]
        ranks = together(calls)
        mine = ranks[-1] if waits_for == "receive" else ranks[0]
        waiting = threads.submit(work, mine)
        time.sleep(0.2)
        assert not waiting.done()
        mine.abort()
        with pytest.raises(TransferError):
            waiting.result(timeout=HANG_S)
        with pytest.raises(TransferError):
            work(mine)
        mine.close()
        mine.abort()  # an abort after the end does nothing
        for rank in ranks:
            if rank is not mine:
                rank.close()


def test_an_abort_reaches_all_connections_even_if_one_is_gone_already() -> None:
    with pipeline(3, timeout_s=HANG_S) as stages, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stages[1].start_receive(torch.empty(8), 1).wait)
        stages.pop(2).close()
        time.sleep(0.1)
        assert not waiting.done()
        stages[1].abort()
        with pytest.raises(TransferError):
            waiting.result(timeout=HANG_S)


def test_joining_without_a_rendezvous_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "JOIN_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(TransferError, match="epoch 1"):
        join(f"{HOST}:1", 0, 2)
