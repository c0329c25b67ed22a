"""Tensors over gloo by way of the CPU: the same as without, and on a GPU where there is one."""

import functools
import threading

import pytest
import torch

from services.worker.rank.data_plane.rendezvous import join
from services.worker.rank.data_plane.staging import StagedTransport
from services.worker.rank.data_plane.transport import RankPlace, Transport
from services.worker.settings import WorkerSettings
from tests.limits import HANG_S
from tests.worker.rank.data_plane.test_transport import CPU, HOST, hidden, rendezvous, together

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def staged(address: str, stage: int, tp_rank: int) -> Transport:
    place = RankPlace("p", 1, stage, n_stages=2, tp_rank=tp_rank, tp_size=2)
    inner = join(place, rendezvous_address=address, data_host=HOST, device=CPU, timeout_s=HANG_S)
    return StagedTransport(inner)


def work(
    address: str, device: str, has_all: threading.Barrier, stage: int, tp_rank: int
) -> list[torch.Tensor]:
    """The tensors that one of two times two ranks gets: activations, a sum, a gather."""
    peers = staged(address, stage, tp_rank)
    activations = torch.empty(5, 8, device=device)
    if stage == 0:
        activations = hidden(1, 5).to(device) + tp_rank
        peers.send(activations, 1)
    else:
        peers.start_receive(activations, 1).wait()
    total = torch.full((2, 1), float(10 * stage + tp_rank), device=device)
    gathered = peers.tensor_parallel.all_gather(total)
    peers.tensor_parallel.all_reduce(total)
    has_all.wait(30)  # an early close could lose what is still on its way
    peers.close()
    return [activations, total, gathered]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_staged_tensors_are_what_they_would_be(device: str) -> None:
    has_all = threading.Barrier(4)
    with rendezvous() as address:
        results = together(
            [
                functools.partial(work, address, device, has_all, stage, tp_rank)
                for stage in range(2)
                for tp_rank in range(2)
            ]
        )
    for index, (activations, total, gathered) in enumerate(results):
        stage, tp_rank = divmod(index, 2)
        assert {t.device.type for t in (activations, total, gathered)} == {device}
        assert torch.equal(activations.cpu(), hidden(1, 5) + tp_rank)
        ranks = [10.0 * stage, 10.0 * stage + 1]
        assert total.eq(sum(ranks)).all()
        assert gathered.tolist() == [ranks, ranks]


@pytest.mark.gpu
def test_a_single_rank_joins_over_nccl_and_leaves() -> None:
    device = torch.device("cuda", 0)
    for epoch in (1, 2):
        with rendezvous() as address:
            peers = join(
                RankPlace("p", epoch, 0, n_stages=1, tp_rank=0, tp_size=1),
                rendezvous_address=address,
                data_host=HOST,
                device=device,
                timeout_s=HANG_S,
            )
            assert peers.tensor_parallel.size == 1
            peers.close()


def test_nccl_on_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="data_plane nccl"):
        WorkerSettings.load("worker", ["--model=x", "--data-plane=nccl"])
