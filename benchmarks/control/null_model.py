"""The model that ranks without a model pretend to have, and how long they take for an iteration."""

import os

from orcinus.v1 import worker_pb2

COMPUTE_MS = "NULL_COMPUTE_MS"
"""Environment variable with the milliseconds of an iteration."""


def compute_s() -> float:
    """Returns the seconds of an iteration."""
    return float(os.environ.get(COMPUTE_MS, "0")) / 1e3


def description() -> worker_pb2.DescribeResponse:
    """Returns the description of the model."""
    return worker_pb2.DescribeResponse(
        model="null", vocab_size=1000, max_model_len=2048, n_kv_blocks=10_000
    )
