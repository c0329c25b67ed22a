"""Triton's operations that work row by row give a row the same bits in any company.

A program computes one row, or a part of one, and its tile does not follow the number of rows.
Attention and products are another matter (`docs/determinism.md`).
"""

import pytest
import torch
from torch import Tensor

from kernels import HeadNorms
from tests.kernels.implementations import INTERPRETED, Implementation
from tests.kernels.rows import Draws, check_rows

pytestmark = pytest.mark.triton

DTYPES = [torch.float32, torch.bfloat16]
N_ROWS = 30


@pytest.mark.parametrize("on", INTERPRETED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_activations_of_a_token(dtype: torch.dtype, on: Implementation) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(N_ROWS, 75).to(dtype), torch.randn(75), torch.randn(75)
    for call in (
        lambda rows: on.ops.rms_norm(x[rows], weight, 1e-5),
        lambda rows: on.ops.layer_norm(x[rows], weight, bias, 1e-5),
        lambda rows: on.ops.silu_and_mul(x[rows, :74]),
        lambda rows: on.ops.gelu_and_mul(x[rows, :74]),
    ):
        check_rows(call, N_ROWS)


@pytest.mark.parametrize("on", INTERPRETED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turned_and_normalised_heads_of_a_token(dtype: torch.dtype, on: Implementation) -> None:
    torch.manual_seed(3)
    head_dim = 20
    qkv = torch.randn(N_ROWS, 5 * head_dim).to(dtype)
    cos, sin = torch.randn(2, N_ROWS, 1, head_dim).to(dtype)
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 1e-6)

    def turned(rows: Tensor) -> Tensor:
        keys, values = torch.zeros(2, len(rows), 1, 1, head_dim, dtype=dtype)
        q = on.ops.rotary_write_kv(
            qkv[rows], cos[rows], sin[rows], keys, values, torch.arange(len(rows)), 3, norms
        )
        return torch.cat([q, keys[:, 0], values[:, 0]], 1)

    check_rows(turned, N_ROWS)


@pytest.mark.parametrize("on", INTERPRETED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_of_a_row(dtype: torch.dtype, on: Implementation) -> None:
    check_rows(Draws(N_ROWS, 199, dtype).sampled_by(on.ops), N_ROWS)
