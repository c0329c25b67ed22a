"""Whether a row of an operation has the same bits in any company."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels import Ops
from kernels.forms.sampling_columns import Penalties, SamplingColumns

N_THREADS = [1, 2, 3, 16]


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Lets PyTorch, and with it the native library, compute with `n` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_rows(compute: Callable[[Tensor], Tensor], n_rows: int) -> None:
    """Checks that a row has the same result in batches of any size and order, and with any number
    of threads.

    `compute` is given the numbers of rows [n] and returns their results [n, ...].
    """
    with threads(1):
        whole = compute(torch.arange(n_rows))
    assert whole.shape[0] == n_rows
    chance = random.Random(n_rows)
    for n in (1, 1, 2, 5, 6, 7, 13, 14, 15, 29, 60):
        rows = torch.tensor(chance.sample(range(n_rows), min(n, n_rows)))
        with threads(chance.choice(N_THREADS)):
            assert torch.equal(compute(rows), whole[rows]), rows


class Draws:
    """Random logits, and how a token is sampled from each row of them, with every option."""

    def __init__(self, n_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        places = torch.arange(n_rows)
        self._logits = (3 * torch.randn(n_rows, vocab_size, generator=generator)).to(dtype)
        numbers = torch.rand(3, n_rows, generator=generator)
        self._columns = {
            "temperature": (numbers[0] + 0.3) * (places % 5 > 0),
            "top_k": places % 60 * (places % 2),
            "top_p": numbers[1].double().clamp(min=0.5).where(places % 3 > 0, 1.0),
            "min_p": numbers[2] / 50,
            "uniform": torch.rand(n_rows, dtype=torch.float64, generator=generator),
        }
        self._counts = torch.randint(
            0, 3, (n_rows, vocab_size), dtype=torch.int32, generator=generator
        )

    def sampled_by(self, ops: Ops) -> Callable[[Tensor], Tensor]:
        """Returns a function that samples tokens with `ops` for given rows."""

        def sampled(rows: Tensor) -> Tensor:
            half = torch.full((len(rows),), 0.5)
            penalties = Penalties(
                rows=torch.arange(len(rows)),
                repetition=half + 1,
                frequency=half,
                presence=half,
                count_rows=rows,
                counts=self._counts,
            )
            columns = SamplingColumns(
                **{name: column[rows] for name, column in self._columns.items()},  # type: ignore[arg-type]
                banned_rows=torch.zeros(0, dtype=torch.int64),
                banned_ids=torch.zeros(0, dtype=torch.int64),
                any_sampled=True,
                any_limited=True,
                any_min_p=True,
                penalties=penalties,
            )
            return ops.sample(self._logits[rows], columns)

        return sampled
