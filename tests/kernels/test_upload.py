"""Where arrays lie on their way to a device, with a CPU in the device's place."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.upload import StagedUploads, Uploads, uploads_for

CPU = torch.device("cpu")
TYPES = (np.bool_, np.int32, np.int64, np.float32, np.float64)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    values = np.arange(int(np.prod(shape))) + draw(st.integers(0, 99))
    return values.reshape(shape).astype(draw(st.sampled_from(TYPES)))


@given(flushes=st.lists(st.lists(arrays(), max_size=6), max_size=8))
def test_everything_arrives_whatever_the_sizes(flushes: list[list[NDArray[Any]]]) -> None:
    uploads = StagedUploads(CPU, size=64)  # so that it grows, and pieces are used again
    arrived = []
    for added in flushes:
        tensors = [uploads.add(values) for values in added]
        kept = [values.copy() for values in added]
        uploads.flush()
        arrived += list(zip(tensors, kept, strict=True))
    for tensor, values in arrived:
        assert tensor.numpy().dtype == values.dtype
        np.testing.assert_array_equal(tensor.numpy(), values)
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0


def test_nothing_is_there_before_it_is_flushed() -> None:
    uploads = StagedUploads(CPU)
    buffer = torch.zeros(64, dtype=torch.uint8)
    uploads.aim(buffer)
    tensor = uploads.add(np.array([3, 4]))
    assert tensor.tolist() == [0, 0]
    uploads.flush()
    assert tensor.tolist() == [3, 4]
    assert uploads.n_bytes == 16


def test_arrays_with_gaps_are_taken() -> None:
    uploads = StagedUploads(CPU)
    tensor = uploads.add(np.arange(12).reshape(3, 4)[:, ::2])
    uploads.flush()
    assert tensor.tolist() == [[0, 2], [4, 6], [8, 10]]


class TestAim:
    def test_gives_the_same_sizes_the_same_addresses(self) -> None:
        uploads = StagedUploads(CPU)
        buffer = torch.empty(256, dtype=torch.uint8)
        addresses = []
        for value in range(5):
            uploads.aim(buffer)
            tensors = [uploads.add(np.full(n, value)) for n in (3, 1, 8)]
            uploads.flush()
            addresses.append([tensor.data_ptr() for tensor in tensors])
            assert [tensor.tolist() for tensor in tensors] == [[value] * n for n in (3, 1, 8)]
            unaimed = uploads.add(np.full(3, value))
            uploads.flush()
            assert unaimed.data_ptr() not in addresses[0]
        assert all(places == addresses[0] for places in addresses)
        assert addresses[0][0] == buffer.data_ptr()

    def test_a_buffer_of_as_many_bytes_as_were_copied_holds_the_same_again(self) -> None:
        uploads = StagedUploads(CPU, size=32)
        sizes = (3, 1, 8, 2)
        for n in sizes:
            uploads.add(np.zeros(n))
        uploads.flush()
        buffer = torch.empty(uploads.n_bytes, dtype=torch.uint8)
        uploads.aim(buffer)
        last = [uploads.add(np.full(n, float(n))) for n in sizes][-1]
        uploads.flush()
        assert buffer.data_ptr() < last.data_ptr() < buffer.data_ptr() + len(buffer)
        assert last.tolist() == [2.0, 2.0]

    def test_what_does_not_fit_goes_elsewhere(self) -> None:
        uploads = StagedUploads(CPU)
        buffer = torch.empty(40, dtype=torch.uint8)  # no multiple of the alignment
        uploads.aim(buffer)
        fits, does_not = uploads.add(np.full(5, 1)), uploads.add(np.full(5, 2))
        uploads.flush()
        assert (fits.tolist(), does_not.tolist()) == ([1] * 5, [2] * 5)
        assert buffer.view(torch.int64).tolist() == [1] * 5

    def test_comes_before_what_it_is_for(self) -> None:
        uploads = StagedUploads(CPU)
        uploads.add(np.zeros(1))
        with pytest.raises(ValueError, match="flushed first"):
            uploads.aim(torch.empty(16, dtype=torch.uint8))


def test_on_a_cpu_a_tensor_is_the_arrays_own_memory() -> None:
    uploads = uploads_for(CPU)
    assert type(uploads) is Uploads
    values = np.arange(3)
    assert uploads.add(values).data_ptr() == values.ctypes.data
    uploads.flush()


@pytest.mark.gpu
def test_a_gpu_gets_what_was_added_although_the_host_goes_on() -> None:
    device = torch.device("cuda", 0)
    uploads = uploads_for(device)
    arrived = []
    for i in range(20):
        tensors = [uploads.add(np.full(n, i)) for n in (1, 1000)]
        uploads.flush()
        arrived.append(tensors)
    for i, tensors in enumerate(arrived):
        assert all(tensor.device == device and bool((tensor == i).all()) for tensor in tensors)
