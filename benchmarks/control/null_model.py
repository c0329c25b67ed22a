"""The description and the iteration time of a model that ranks only pretend to have."""

import os

from orcinus.v1 import worker_pb2

COMPUTE_MS = "NULL_COMPUTE_MS"
"""Environment variable that sets the duration of an iteration in milliseconds."""


def compute_s() -> float:
    """Returns the duration of an iteration in seconds: 0 if `NULL_COMPUTE_MS` is not set."""
    return float(os.environ.get(COMPUTE_MS, "0")) / 1e3


def description() -> worker_pb2.DescribeResponse:
    """Returns the description that a rank without a model reports: vocabulary, context and K/V
    blocks."""
    return worker_pb2.DescribeResponse(
        model="null", vocab_size=1000, max_model_len=2048, n_kv_blocks=10_000
    )
