"""The data plane: activations from rank to rank, in the process groups of one epoch.

A group is made from the rendezvous store under the epoch's prefix, by explicit objects and not
through torch's global default group, so that nothing of an old epoch can reach a new one. The
same ranks of neighbouring stages exchange tensors. CPU tensors travel by gloo, CUDA tensors by
NCCL.

Gloo matches sends with receives by tag, and the tag is the iteration; NCCL matches by order,
which plans arrive in.
"""

import contextlib
import socket
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, Work

MAX_TAG = 2**31
MAX_PENDING_SENDS = 4
"""Sends that may be under way before the next one waits for the oldest."""

GROUP_TIMEOUT = timedelta(seconds=30)


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


class Transport(Protocol):
    """Moves hidden states [n_tokens, hidden_size] from stage to stage."""

    def receive(self, hidden: torch.Tensor, iteration: int) -> None:
        """Fills `hidden` with what the previous stage sent for the iteration.

        Raises:
            TransferError: it did not come.
        """

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """Hands `hidden` to the next stage and does not wait until it is there.

        Raises:
            TransferError: the next stage is gone.
        """

    def close(self) -> None:
        """Leaves the epoch's groups; what is under way is dropped."""


class Group(Protocol):
    """What gloo's and NCCL's process groups have in common, as far as it is used here."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts a send."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts a receive."""

    def abort(self) -> None:
        """Drops what is under way."""


def create_rendezvous(host: str, port: int) -> TCPStore:
    """The store where all ranks meet, listening on `host` only; port 0 takes a free one."""
    listener = socket.create_server((host, port))
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=GROUP_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def join(
    place: Place, *, rendezvous_address: str, data_host: str, device: torch.device, timeout_s: float
) -> Transport:
    """Builds the groups of an epoch and exchanges a first tensor with each neighbour.

    Raises:
        TransferError: the other ranks could not be reached.
    """
    host, _, port = rendezvous_address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=GROUP_TIMEOUT
        )
        prefixed = PrefixStore(place.prefix, store)
        group = _group(prefixed, place.world_rank, place.world_size, device, data_host, timeout)
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"no process group for epoch {place.epoch}: {error}") from error
    transport = GroupTransport(place, group)
    transport.warm_up(device)
    return transport


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
        options._timeout = timeout
        group = gloo(store, rank, size, options)
    return cast(Group, group)


class GroupTransport:
    """Point-to-point transfers in one process group."""

    def __init__(self, place: Place, group: Group) -> None:
        self._place = place
        self._group = group
        self._previous = place.world_rank - place.tp_size
        self._next = place.world_rank + place.tp_size
        # A tensor must live until it has been sent, so it is kept beside its work handle.
        self._pending: deque[tuple[Work, torch.Tensor]] = deque()

    def warm_up(self, device: torch.device) -> None:
        """Opens the connections to both neighbours, which happens with the first transfer.

        Raises:
            TransferError: a neighbour did not answer.
        """
        token = torch.zeros(1, device=device)
        if self._place.stage_index > 0:
            self.receive(token, 0)
        if self._place.stage_index + 1 < self._place.n_stages:
            self.send(token, 0)
            self._retire(0)

    def receive(self, hidden: torch.Tensor, iteration: int) -> None:
        """See `Transport.receive`."""
        try:
            self._group.recv([hidden], self._previous, iteration % MAX_TAG).wait()
        except RuntimeError as error:
            raise TransferError(f"nothing from rank {self._previous}: {error}") from error

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """See `Transport.send`."""
        try:
            work = self._group.send([hidden], self._next, iteration % MAX_TAG)
            self._pending.append((work, hidden))
            self._retire(MAX_PENDING_SENDS)
        except RuntimeError as error:
            raise TransferError(f"rank {self._next} takes nothing: {error}") from error

    def close(self) -> None:
        """See `Transport.close`."""
        with contextlib.suppress(RuntimeError):  # nothing to abort in a group that is broken
            self._group.abort()
        self._pending.clear()
        del self._group  # gloo closes its sockets, and tells its peers, only when the group is gone

    def _retire(self, n_left: int) -> None:
        while self._pending and (len(self._pending) > n_left or self._pending[0][0].is_completed()):
            self._pending.popleft()[0].wait()
