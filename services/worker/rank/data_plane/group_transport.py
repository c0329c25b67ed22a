"""A transport over two process groups: one of the pipeline, and one of the stage.

Transfers use the group of the pipeline, collectives the group of the stage. Gloo matches sends with
receives by a tag, which is the number of the iteration. NCCL matches sends with receives by order,
which is the order of plans.

An NCCL group manages CUDA streams itself: it has a communicator and a stream for each pair of
ranks, so that sends, receives and sums do not wait for each other. The stream of a transfer waits
for all work that the rank has launched before the transfer. A send therefore begins when its tensor
is computed, and runs in parallel with work that the rank launches afterwards. `Work.wait` makes the
rank's stream wait for the transfer and returns at once, so that only the layers of an iteration
wait for its activations. A receive that is started after the launch of an iteration begins when
that iteration is computed; an earlier begin would only occupy multiprocessors.

Gloo and NCCL detect the loss of a peer only if its sockets are closed. If a peer only hangs, waits
must be ended by `abort`.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch.distributed import Work

from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank.data_plane.groups import MAX_TAG, Group, abort_group, wait_timeout
from services.worker.rank.data_plane.transport import (
    MAX_PENDING_SENDS,
    RankPlace,
    Receipt,
    TransferError,
)


class GroupTransport:
    """Transfers tensors in the process group of the pipeline, and offers collectives in the process
    group of the stage."""

    def __init__(
        self,
        place: RankPlace,
        pipeline: Group,
        stage: Group,
        *,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.place = place
        self.pipeline = pipeline
        self._stage = stage
        self._device = device
        self._timeout = wait_timeout(pipeline, timeout)
        self._is_open = True
        self._ending = threading.Lock()
        self._previous = place.world_rank - place.tp_size
        self._next = place.world_rank + place.tp_size
        self._sends: deque[_Transfer] = deque()

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks that share this stage's layers. Their collectives use the group of the
        stage."""
        if self.place.tp_size == 1:
            return SINGLE
        return GroupTensorParallel(self._stage, self.place.tp_rank, self.place.tp_size)

    def warm_up(self) -> None:
        """Exchanges a first tensor with each neighbour, as `Transport.warm_up` specifies."""
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
        """Starts to receive the previous stage's hidden states, as `Transport.start_receive`
        specifies."""
        what = f"nothing from rank {self._previous}"
        with transfer(what):
            work = self.pipeline.recv([hidden], self._previous, iteration % MAX_TAG)
        return _Transfer(work, hidden, what, self._timeout)

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """Starts to send `hidden` to the next stage, as `Transport.send` specifies."""
        what = f"rank {self._next} takes nothing"
        with transfer(what):
            work = self.pipeline.send([hidden], self._next, iteration % MAX_TAG)
        self._sends.append(_Transfer(work, hidden, what, self._timeout))
        self._retire(MAX_PENDING_SENDS)

    def abort(self) -> None:
        """Makes all current and later operations raise TransferError, as `Transport.abort`
        specifies."""
        place = self.place
        with self._ending:
            if self._is_open:
                abort_group(self.pipeline, place.world_rank, place.world_size)
                abort_group(self._stage, place.tp_rank, place.tp_size)

    def close(self) -> None:
        """Leaves the epoch's groups and drops all transfers in flight."""
        with self._ending:
            self._is_open = False
            for group in (self.pipeline, self._stage):
                with contextlib.suppress(RuntimeError):  # the group may be broken already
                    group.abort()
            self._sends.clear()
            # Gloo closes its sockets, which its peers notice, only when the group is deleted.
            del self.pipeline, self._stage, group

    def _retire(self, n_left: int) -> None:
        """Waits for the oldest sends until at most `n_left` are in flight. Drops finished sends."""
        while self._sends and (len(self._sends) > n_left or self._sends[0].is_completed):
            self._sends.popleft().wait()


class GroupTensorParallel:
    """Computes the collectives of the ranks of one stage; implements `TensorParallel`."""

    def __init__(self, group: Group, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` over all ranks, in place.

        On a CPU every element is summed in the order of the ranks, whatever the shape of `tensor`.
        """
        with transfer("a rank of this stage does not answer"):
            if tensor.is_cpu and self.size > 2:  # the sum of two numbers has only one order
                self._sum_in_order(tensor)
            else:
                self._group.allreduce([tensor]).wait()

    def _sum_in_order(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` over all ranks in the order of the ranks. Each rank sums one slice of the
        tensor.

        The number of bytes transferred equals that of Gloo's ring algorithm, in which the sum of
        each slice begins at a different rank.
        """
        n = tensor.numel()
        size = -(-n // self.size)  # number of elements of a slice
        given, parts = tensor.new_zeros(2, self.size, size)
        given.view(-1)[:n] = tensor.reshape(-1)
        self._group.alltoall_base(parts, given, [], []).wait()
        total = parts[0]
        for part in parts[1:]:
            total += part
        self._group.allgather([list(given)], [total]).wait()
        tensor.copy_(given.view(-1)[:n].view(tensor.shape))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, concatenated along the last dimension in the order of
        the ranks."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with transfer("a rank of this stage does not answer"):
            self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)


class _Transfer:
    """A transfer in flight. It keeps a reference to its tensor, whose memory must not be freed
    before the transfer ends."""

    def __init__(self, work: Work, tensor: torch.Tensor, what: str, timeout: timedelta) -> None:
        self._work = work
        self._tensor = tensor
        self._what = what
        self._timeout = timeout

    @property
    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits until the tensor may be used, as `Receipt.wait` specifies."""
        with transfer(self._what):
            self._work.wait(self._timeout)


@contextlib.contextmanager
def transfer(what: str) -> Iterator[None]:
    """Turns errors of a process group into a TransferError, whose text begins with `what`."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"{what}: {error}") from error
