"""Transfers of GPU tensors by gloo: copied to the CPU, sent, and copied back.

This transport is slower than NCCL, and the host waits for the device. It is for ranks that cannot
use NCCL: several ranks on one GPU, or GPUs of different vendors.
"""

import torch

from services.worker.models.tensor_parallel import TensorParallel
from services.worker.rank.data_plane.transport import Receipt, Transport


class StagedTransport:
    """Transfers GPU tensors through a transport for CPU tensors."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tensor_parallel = StagedTensorParallel(transport.tensor_parallel)

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks that share this stage's layers. Their collectives go through CPU memory."""
        return self._tensor_parallel

    def warm_up(self) -> None:
        """Exchanges a first tensor with each neighbour, as `Transport.warm_up` specifies."""
        self._transport.warm_up()

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        """Starts to receive hidden states into a CPU tensor. `wait` of the result copies them to
        the device."""
        staged = torch.empty_like(hidden, device="cpu")
        return _StagedReceipt(self._transport.start_receive(staged, iteration), staged, hidden)

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        """Copies `hidden` to the CPU, and starts to send the copy to the next stage."""
        self._transport.send(hidden.cpu(), iteration)

    def abort(self) -> None:
        """Makes all current and later operations raise TransferError."""
        self._transport.abort()

    def close(self) -> None:
        """Leaves the epoch's groups and drops all transfers in flight."""
        self._transport.close()


class StagedTensorParallel:
    """Computes collectives of GPU tensors with collectives of CPU tensors."""

    def __init__(self, ranks: TensorParallel) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self._ranks = ranks

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor by its sum over all ranks."""
        if self.size > 1:
            staged = tensor.to("cpu", copy=True)
            self._ranks.all_reduce(staged)
            tensor.copy_(staged)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, concatenated along the last dimension in the order of
        the ranks."""
        if self.size == 1:
            return tensor
        return self._ranks.all_gather(tensor.cpu()).to(tensor.device)


class _StagedReceipt:
    """A receive into a CPU tensor; `wait` copies the received tensor to the device."""

    def __init__(self, receipt: Receipt, staged: torch.Tensor, hidden: torch.Tensor) -> None:
        self._receipt = receipt
        self._staged = staged
        self._hidden = hidden

    def wait(self) -> None:
        """Waits until the tensor is received, and copies it to the device."""
        self._receipt.wait()
        self._hidden.copy_(self._staged)
