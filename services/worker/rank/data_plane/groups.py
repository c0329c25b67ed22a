"""Process groups of gloo and of NCCL, behind one protocol.

How they are made and how they are aborted differs, and nothing else outside this module depends on
which of them a group is, but for the timeout of a transfer (`wait_timeout`).
"""

import contextlib
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch.distributed import Store, Work

MAX_TAG = 2**31 - 1

CONNECT_TIMEOUT = timedelta(seconds=4)
"""Timeout of a connection within a group, once all its ranks have come; gloo waits five times as
long."""

_ABORT_TAG = MAX_TAG  # of a receive to which no rank sends
_NO_TIMEOUT = timedelta(0)  # to a `wait`: that of the group holds


class Group(Protocol):
    """The operations of gloo's and NCCL's process groups that are used here."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts a send."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts a receive."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        """Starts a sum over all ranks, in place."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work:
        """Starts a gather to all ranks."""

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        /,
    ) -> Work:
        """Starts an exchange of even slices: each rank gets the slices of its number."""

    def abort(self) -> None:
        """Drops what is under way."""


def make_group(
    store: Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    data_host: str,
    timeout: timedelta,
) -> Group:
    """Connects `size` ranks that meet in `store`: by NCCL for a GPU's tensors, otherwise by gloo
    on the address `data_host`.

    Raises RuntimeError or ValueError if they cannot be reached.
    """
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


def wait_timeout(group: Group, timeout: timedelta) -> timedelta:
    """Returns what `Work.wait` is to be given for a transfer in a group with this timeout."""
    # NCCL has the timeout in its options. Given to `wait`, it would hold up the host.
    return timeout if isinstance(group, dist.ProcessGroupGloo) else _NO_TIMEOUT


def abort_group(group: Group, rank: int, size: int) -> None:
    """Ends all operations of a group of `size` ranks, of which this is number `rank`."""
    if isinstance(group, dist.ProcessGroupGloo):
        # Gloo has no abort. But a receive that is not answered in time closes all connections of
        # its group, and with them ends all other operations; one whose peer is gone does not.
        for peer in range(size):
            if peer != rank:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    else:
        group.abort()
