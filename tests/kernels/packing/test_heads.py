"""Products of heads with their matrices against the reference, on odd sizes and odd strides."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.native import heads
from kernels.native.library import open_library, runnable
from kernels.packing.heads import pack_heads
from kernels.pytorch.heads import PlainHeads
from kernels.reference import operations as reference
from kernels.weights.head_products import HeadProducts
from tests.kernels.implementations import BUILDS

DTYPES = [torch.float32, torch.bfloat16]
N_TOKENS = [0, 1, 5, 6, 7, 13, 100]

Pack = Callable[[Tensor], HeadProducts]


@pytest.fixture(name="pack", params=["plain", *BUILDS])
def make_pack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pack]:
    """Packs matrices for PyTorch, or for one build of the native library."""
    if request.param == "plain":
        yield PlainHeads
        return
    monkeypatch.setattr(heads, "library", lambda: open_library(request.param))
    heads._functions.cache_clear()
    yield heads.NativeHeads.of
    heads._functions.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n_heads", "n_out", "n_in"), [(3, 20, 10), (1, 1, 1), (4, 64, 13), (2, 130, 128), (5, 7, 65)]
)
def test_products_of_heads(
    pack: Pack, n_heads: int, n_out: int, n_in: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(n_out)
    weight = torch.randn(n_heads, n_out, n_in).to(dtype)
    form = pack(weight)
    for n in N_TOKENS:
        # Cut out of longer heads, as what turns stands behind what does not.
        x = torch.randn(n, n_heads, n_in + 3).to(dtype)[..., :n_in]
        ours, expected = form(x), reference.head_products(x, weight)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_and_vectors_in_any_order_of_memory(pack: Pack, dtype: torch.dtype) -> None:
    weight = torch.randn(4, 9, 30).to(dtype).transpose(1, 2)
    x = torch.randn(9, 4, 11).to(dtype).permute(2, 1, 0)
    torch.testing.assert_close(
        pack(weight)(x), reference.head_products(x, weight), rtol=2e-2, atol=2e-2
    )


@pytest.mark.skipif(not runnable(), reason="the native library is not built")
def test_products_of_other_heads_are_refused() -> None:
    form = pack_heads(torch.randn(3, 5, 4))
    for x in (torch.randn(2, 3, 5), torch.randn(2, 4, 4), torch.randn(2, 3, 4).bfloat16()):
        with pytest.raises(ValueError, match=r"for \(3, 5, 4\) of torch.float32"):
            form(x)


def test_other_element_types_stay_as_they_are() -> None:
    assert isinstance(pack_heads(torch.randn(2, 3, 4, dtype=torch.float64)), PlainHeads)
    assert isinstance(pack_heads(torch.randn(2, 3, 4, device="meta")), PlainHeads)
