"""The tensors in a safetensors file in memory are those that the library reads."""

import json
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from services.worker.models.adapters.weights_header import MAX_HEADER_BYTES, stored_values


def test_tensors_are_those_that_the_library_reads() -> None:
    content = save(
        {
            "a": torch.randn(3, 5),
            "b": torch.randn(7, dtype=torch.float64),
            "c": torch.randn(2, 2).bfloat16(),
            "none": torch.empty(0, 4, dtype=torch.float16),
            "one": torch.tensor(1.5),
        },
        {"format": "pt"},
    )
    expected = {
        key: (tuple(one["shape"]), one["dtype"], bytes(one["data"]))
        for key, one in deserialize(content)  # type: ignore[no-untyped-call]
    }
    found = stored_values(content)
    assert {key: (one.shape, one.dtype, bytes(one.data)) for key, one in found.items()} == expected


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": {"dtype": "F32"}},
        {"a": entry(dtype="F31")},
        {"a": entry(dtype=4)},
        {"a": entry(shape=[3])},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[-1, -2])},
        {"a": entry(shape=[2.0])},
        {"a": entry(shape=[True, 2])},
        {"a": entry(shape=[2**70, 2])},
        {"a": entry(4, 12)},
        {"a": entry(-8, 0)},
        {"a": entry(8, 0)},
        {"a": entry(0, 4, [1])},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])},
        {"a": entry(0, 16, [4])},
    ],
    ids=str,
)
def test_a_header_that_the_library_refuses_is_refused(header: Any) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(SafetensorError):
        deserialize(content)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"header|range|end with|element type"):
        stored_values(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"none",
        (2**63).to_bytes(8, "little"),
        (10).to_bytes(8, "little") + b"{}",
        (1).to_bytes(8, "little") + b"{",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
    ids=len,
)
def test_broken_content_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        stored_values(content)


def test_a_header_is_bounded() -> None:
    n_bytes = MAX_HEADER_BYTES + 1
    content = n_bytes.to_bytes(8, "little") + b" " * n_bytes
    with pytest.raises(ValueError, match="wrong length"):
        stored_values(content)
