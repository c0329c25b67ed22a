"""Tokens that plans leave out: the same on the host and on a device."""

import numpy as np
import pytest
import torch

from kernels.upload import StagedUploads, Uploads
from services.worker.engine.last_tokens import LastTokens, TokensOnDevice, TokensOnHost, last_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tokens", "uploads"),
    [(TokensOnHost(), Uploads()), (TokensOnDevice(CPU), StagedUploads(CPU))],
    ids=["host", "device"],
)
def test_the_last_token_of_each_row_is_put_where_it_is_left_out(
    tokens: LastTokens, uploads: Uploads
) -> None:
    def keep(rows: list[int], sampled: list[int]) -> None:
        places = tokens.numbers(np.array(rows), uploads)
        chosen = np.array(sampled)
        uploads.flush()
        tokens.keep(places, torch.tensor(sampled) if isinstance(places, torch.Tensor) else chosen)

    def put(places: list[int], rows: list[int]) -> list[int]:
        batch = uploads.add(np.array([90, 91, 92, 93]))
        numbers = [tokens.numbers(np.array(values), uploads) for values in (places, rows)]
        uploads.flush()
        tokens.put(batch, *numbers)
        return batch.tolist()

    tokens.grow(2)
    keep([1, 0], [11, 10])
    assert put([3, 1], [0, 1]) == [90, 11, 92, 10]
    tokens.grow(4)
    keep([3, 1], [13, 21])
    assert put([0, 1, 2], [3, 1, 0]) == [13, 21, 10, 93]
    keep([0], [-1])
    assert put([2], [0]) == [90, 91, 0, 93]


def test_they_are_the_hosts_on_a_cpu() -> None:
    assert isinstance(last_tokens(CPU), TokensOnHost)
