"""The data plane: activations from rank to rank, in the process groups of one epoch.

A group is made from the rendezvous store under the epoch's prefix, by explicit objects and not
through torch's global default group, so that nothing of an old epoch can reach a new one. The
same ranks of neighbouring stages exchange hidden states; the ranks of one stage have a second
group, for the sums and gathers of tensor parallelism. CPU tensors travel by gloo, CUDA tensors by
NCCL.

Nothing here waits that need not. A receive is started as soon as its plan is known, which is
before the activations are on their way and may be long before the rank gets to them; a send is
not waited for. Gloo matches sends with receives by tag, and the tag is the iteration; NCCL
matches by order, which plans arrive in.

NCCL's group does by itself what a rank on a GPU needs of streams. For each pair of ranks it has a
communicator and a stream of its own, so that sends, receives and sums do not wait for each other.
That stream waits for what the rank has launched before it asked for the transfer: a send begins
when its tensor is computed, and what the rank launches next runs beside it. `Work.wait` lets the
rank's stream wait for the transfer and returns at once, so that nothing but the layers of an
iteration waits for its activations. A receive that is asked for behind an iteration begins when
that has been computed; until then it would only keep multiprocessors from computing.

What a vanished or stopped peer leaves waiting is called off from another thread, by `abort`: gloo
and NCCL notice a peer whose sockets are closed, and no other.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, Work

from services.worker.models.tensor_parallel import SINGLE, TensorParallel

MAX_TAG = 2**31 - 1
MAX_PENDING_SENDS = 4
"""Sends that may be under way before the next one waits for the oldest; with NCCL, the device does,
and the host goes on."""

JOIN_TIMEOUT = timedelta(seconds=30)
"""How long the ranks of an epoch wait for each other."""

CONNECT_TIMEOUT = timedelta(seconds=4)
"""For a connection within a group, once all its ranks have come; gloo waits five times as long."""

ABORT_TAG = MAX_TAG
"""Of a receive that nobody sends for."""

NO_TIMEOUT = timedelta(0)
"""To a `wait`: what the group says."""


class TransferError(Exception):
    """A tensor could not be sent or received: the epoch is over for this rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in its pipeline."""

    pipeline_id: str
    epoch: int
    stage_index: int
    n_stages: int
    tp_rank: int
    tp_size: int

    @property
    def world_size(self) -> int:
        return self.n_stages * self.tp_size

    @property
    def world_rank(self) -> int:
        """Number among all ranks: those of a stage are neighbours."""
        return self.stage_index * self.tp_size + self.tp_rank

    @property
    def prefix(self) -> str:
        return f"{self.pipeline_id}/{self.epoch}"


class Receipt(Protocol):
    """A receive that has been started."""

    def wait(self) -> None:
        """Returns when the tensor may be used: on a CPU it is there, on a GPU the current stream
        will not touch it before it is.

        Raises:
            TransferError: it did not come.
        """


class Transport(Protocol):
    """Moves hidden states [n_tokens, hidden_size] from stage to stage."""

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks that share this stage's layers; its operations raise TransferError."""

    def warm_up(self) -> None:
        """Exchanges a first tensor with each neighbour, which opens what connections are missing.

        Raises:
            TransferError: a neighbour did not answer.
        """

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        """Starts to fill `hidden` with what the previous stage sends for the iteration.

        Receives are started in the order of their iterations.

        Raises:
            TransferError: the previous stage is gone.
        """

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """Hands `hidden` to the next stage and does not wait until it is there.

        Raises:
            TransferError: the next stage is gone.
        """

    def abort(self) -> None:
        """Ends whatever waits and whatever is tried from now on with a TransferError; may be called
        from any thread."""

    def close(self) -> None:
        """Leaves the epoch's groups; what is under way is dropped."""


class Group(Protocol):
    """What gloo's and NCCL's process groups have in common, as far as it is used here."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts a send."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts a receive."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        """Starts a sum over all ranks, in place."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work:
        """Starts a gather to all ranks."""

    def abort(self) -> None:
        """Drops what is under way."""


def create_rendezvous(host: str, port: int) -> TCPStore:
    """The store where all ranks meet, listening on `host` only; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def join(
    place: Place, *, rendezvous_address: str, data_host: str, device: torch.device, timeout_s: float
) -> Transport:
    """Builds the groups of an epoch, when all its ranks are there.

    Raises:
        TransferError: the other ranks could not be reached.
    """
    host, _, port = rendezvous_address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = PrefixStore(
            place.prefix,
            TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT
            ),
        )
        _meet(store, place)
        pipeline = _group(store, place.world_rank, place.world_size, device, data_host, timeout)
        stage_store = PrefixStore(f"stage {place.stage_index}", store)
        stage = _group(stage_store, place.tp_rank, place.tp_size, device, data_host, timeout)
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"no process group for epoch {place.epoch}: {error}") from error
    return GroupTransport(place, pipeline, stage, device, timeout)


def _meet(store: Store, place: Place) -> None:
    # So that groups are only made of ranks that are there, and need no patience of their own.
    store.set(f"here/{place.world_rank}", "")
    store.wait([f"here/{rank}" for rank in range(place.world_size)], JOIN_TIMEOUT)


def _group(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    data_host: str,
    timeout: timedelta,
) -> Group:
    # torch's type stubs know neither Gloo's options nor the transfers of its groups.
    options: Any
    group: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=data_host)]
        options._timeout = CONNECT_TIMEOUT
        group = gloo(store, rank, size, options)
        group._set_default_timeout(timeout)  # of collectives; transfers are waited for with theirs
    return cast(Group, group)


def _abort(group: Group, rank: int, size: int) -> None:
    if isinstance(group, dist.ProcessGroupGloo):
        # Gloo has no abort. But a receive that nobody answers in time closes all connections of
        # its group, and with them ends all other operations; one whose peer is gone does not.
        for peer in range(size):
            if peer != rank:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))
    else:
        group.abort()


class _Transfer:
    """A transfer under way, and the tensor that must live as long as it is."""

    def __init__(self, work: Work, tensor: torch.Tensor, what: str, timeout: timedelta) -> None:
        self._work = work
        self._tensor = tensor
        self._what = what
        self._timeout = timeout

    @property
    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """See `Receipt.wait`."""
        with transfer(self._what):
            self._work.wait(self._timeout)


class GroupTransport:
    """Point-to-point transfers in the pipeline's group, collectives in the stage's."""

    def __init__(
        self,
        place: Place,
        pipeline: Group,
        stage: Group,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.place = place
        self.pipeline = pipeline
        self._stage = stage
        self._device = device
        # NCCL has it in its options. Given to `wait`, it would hold up the host.
        is_gloo = isinstance(pipeline, dist.ProcessGroupGloo)
        self._timeout = timeout if is_gloo else NO_TIMEOUT
        self._is_open = True
        self._ending = threading.Lock()
        self._previous = place.world_rank - place.tp_size
        self._next = place.world_rank + place.tp_size
        self._sends: deque[_Transfer] = deque()

    @property
    def tensor_parallel(self) -> TensorParallel:
        """See `Transport.tensor_parallel`."""
        if self.place.tp_size == 1:
            return SINGLE
        return GroupTensorParallel(self._stage, self.place.tp_rank, self.place.tp_size)

    def warm_up(self) -> None:
        """See `Transport.warm_up`."""
        token = torch.zeros(1, device=self._device)
        self.tensor_parallel.all_reduce(token)
        if self.place.stage_index > 0:
            self.start_receive(token, 0).wait()
        if self.place.stage_index + 1 < self.place.n_stages:
            self.send(token, 0)
            self._retire(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        """See `Transport.start_receive`."""
        what = f"nothing from rank {self._previous}"
        with transfer(what):
            work = self.pipeline.recv([hidden], self._previous, iteration % MAX_TAG)
        return _Transfer(work, hidden, what, self._timeout)

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """See `Transport.send`."""
        what = f"rank {self._next} takes nothing"
        with transfer(what):
            work = self.pipeline.send([hidden], self._next, iteration % MAX_TAG)
        self._sends.append(_Transfer(work, hidden, what, self._timeout))
        self._retire(MAX_PENDING_SENDS)

    def abort(self) -> None:
        """See `Transport.abort`."""
        place = self.place
        with self._ending:
            if self._is_open:
                _abort(self.pipeline, place.world_rank, place.world_size)
                _abort(self._stage, place.tp_rank, place.tp_size)

    def close(self) -> None:
        """See `Transport.close`."""
        with self._ending:
            self._is_open = False
            for group in (self.pipeline, self._stage):
                with contextlib.suppress(RuntimeError):  # nothing to abort in a broken group
                    group.abort()
            self._sends.clear()
            # Gloo closes its sockets, and tells its peers, only when the group is gone.
            del self.pipeline, self._stage, group

    def _retire(self, n_left: int) -> None:
        while self._sends and (len(self._sends) > n_left or self._sends[0].is_completed):
            self._sends.popleft().wait()


class GroupTensorParallel:
    """The ranks of one stage, as a model knows them."""

    def __init__(self, group: Group, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums over all ranks, in place."""
        with transfer("a rank of this stage does not answer"):
            self._group.allreduce([tensor]).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension, in the order of the ranks."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with transfer("a rank of this stage does not answer"):
            self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)


@contextlib.contextmanager
def transfer(what: str) -> Iterator[None]:
    """Turns the errors of a process group into TransferError, saying what was tried."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"{what}: {error}") from error
