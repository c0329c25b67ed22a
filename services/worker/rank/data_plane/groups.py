"""Process groups of gloo and of NCCL, behind one protocol.

The two kinds of groups are created and aborted differently, and need different timeouts for
transfers (`wait_timeout`). Code outside this module does not depend on the kind of a group.
"""

import contextlib
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch.distributed import Store, Work

MAX_TAG = 2**31 - 1

CONNECT_TIMEOUT = timedelta(seconds=4)
"""Timeout for opening the connections of a group, after all its ranks have met. Gloo multiplies
this timeout by five."""

_ABORT_TAG = MAX_TAG  # the tag of a receive for which no rank sends
_NO_TIMEOUT = timedelta(0)  # as an argument of `Work.wait`: the timeout of the group applies


class Group(Protocol):
    """The part of torch's process groups that the transport uses: transfers, collectives and
    `abort`."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts to send `tensors` to the rank `peer`."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Starts to receive `tensors` from the rank `peer`."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        """Starts to replace a tensor by its sum over all ranks."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work:
        """Starts to gather the tensor of each rank into `outputs` on all ranks."""

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        /,
    ) -> Work:
        """Starts an exchange of slices of equal size: rank r gets slice r of each rank's tensor."""

    def abort(self) -> None:
        """Cancels all operations in flight."""


def make_group(
    store: Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    data_host: str,
    timeout: timedelta,
) -> Group:
    """Connects `size` ranks that meet in `store` as a group. The group uses NCCL if `device` is a
    GPU, otherwise gloo on the address `data_host`.

    Raises RuntimeError or ValueError if the other ranks cannot be reached.
    """
    # torch's type stubs have neither the options of gloo nor the transfers of its groups.
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
        group._set_default_timeout(timeout)  # for collectives; a wait for a transfer has its own
    return cast(Group, group)


def wait_timeout(group: Group, timeout: timedelta) -> timedelta:
    """Returns the timeout argument for `Work.wait`, for a transfer in `group` that may take
    `timeout`. Gloo and NCCL need different arguments."""
    # NCCL has the timeout in its options. With an argument, `Work.wait` would block the host.
    return timeout if isinstance(group, dist.ProcessGroupGloo) else _NO_TIMEOUT


def abort_group(group: Group, rank: int, size: int) -> None:
    """Ends all operations in flight of a group of `size` ranks, in which this process is `rank`."""
    if isinstance(group, dist.ProcessGroupGloo):
        # Gloo has no abort. A receive that times out closes all connections of its group, which
        # ends all other operations. A receive from a peer that is gone has no such effect.
        for peer in range(size):
            if peer != rank:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    else:
        group.abort()
