"""Fits the parameters of the paper's engines to Figure 9 alone.

Part b of the figure, 101B on one stage, has the times of batches by size and length of prompts. For
part c, 175B on two stages, the paper's text has two numbers: one time of Orca, and the largest
ratio of FasterTransformer's time to Orca's. Errors are differences of logarithms, so that all
points have equal weight. Both engines use the same libraries for matrix products (section 6.1), so
both have equal parameters for reading and multiplying.

Figure 9 does not determine two parameters. First, the fixed time of a layer cannot be separated
from the time for reading the weights. Both are part of every iteration, and with one stage both are
proportional to the number of iterations. So the fixed time is not fitted, but is the sum of its
parts (`LAYER_S`). Second, the attention of prompts cannot be separated from their matrix products:
there are only two lengths of prompts, and both are too short for the quadratic growth of attention.
So there are two extreme fits. In one, attention of prompts takes no time. In the other, products
run at the hardware's peak rate, and attention takes all the rest.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, least_squares

from benchmarks.paper.gpu_costs import Gpu, GpuCosts
from benchmarks.paper.models import MODELS, PaperModel
from benchmarks.paper.published import (
    BATCH_SIZES,
    FIGURE_9B_MS,
    FIGURE_9C_FASTER,
    FIGURE_9C_MS_PER_TOKEN,
    N_OUTPUT,
)
from simulator.costs import IterationWork

PEAK_BANDWIDTH, PEAK_PRODUCTS = 1.555e12, 312e12 / 2
"""Memory bandwidth in bytes per second and multiplications per second of an A100 in fp16, from its
data sheet."""

SUMS_S = 2 * 25e-6
"""Seconds per layer for two all-reduces over the 8 GPUs of a host."""
LAYER_S = SUMS_S + 10 * 5e-6
"""Seconds per layer of Orca's engine that do not depend on the batch: all-reduces and ten launches
of kernels. About 25 us for an all-reduce of a small tensor with NCCL over NVLink, and about 5 us
for a launch, are from experience and not from the paper."""

NO_PAIRS, ALL_PAIRS = "attention of prompts takes no time", "it takes all that Figure 9 leaves"
"""Names of the two fits to Figure 9, by their assumption about the attention of prompts."""

START = {NO_PAIRS: (1.0e12, 80e12, 4e-6, 1e-4, 2e-6), ALL_PAIRS: (1.0e12, 5e-10, 4e-6, 1e-4, 2e-6)}
"""Starting point of the search, for each fit. The five numbers are the memory bandwidth; the rate
of matrix products or, for the second fit, the seconds of attention per pair of tokens; the seconds
of a request in a layer of Orca; the fixed seconds of a layer of FasterTransformer; and the seconds
of a request in a layer of FasterTransformer."""

LARGEST = {
    NO_PAIRS: (PEAK_BANDWIDTH, PEAK_PRODUCTS, 1e-4, 1e-3, 1e-4),
    ALL_PAIRS: (PEAK_BANDWIDTH, 1e-7, 1e-4, 1e-3, 1e-4),
}
SMALLEST_PART = 1e-4
"""Lower bound of each fitted parameter, divided by its upper bound in `LARGEST`."""

LARGEST_SYNC_S = 1.0
AT_BOUND = 1e-3
"""A fitted parameter counts as being at a bound if its logarithm differs from the bound's logarithm
by less than this number."""


def batch_s(costs: GpuCosts, batch_size: int, n_prompt: int, n_output: int = N_OUTPUT) -> float:
    """Returns the seconds from the prompts to the last tokens of a batch of equal requests, in an
    otherwise empty pipeline."""
    prefill = IterationWork.of([(0, n_prompt, True)] * batch_size)
    decodes = (
        IterationWork.of([(n_prompt + n_before, 1, True)] * batch_size)
        for n_before in range(n_output - 1)
    )
    return sum(map(costs.iteration_s, (prefill, *decodes)))


def fit(kind: str) -> dict[str, Gpu]:
    """Returns the parameters of both engines, `orca` and `ft`, from the fit `kind`.

    Raises:
        RuntimeError: a parameter is at its bound, so that the points do not determine it.
    """

    def residuals(logs: npt.NDArray[np.float64]) -> list[float]:
        return [error for _, error in errors(_engines(np.exp(logs), kind))]

    smallest, largest = np.log(np.multiply(LARGEST[kind], SMALLEST_PART)), np.log(LARGEST[kind])
    found = least_squares(residuals, np.log(START[kind]), bounds=(smallest, largest))
    if np.any(np.minimum(found.x - smallest, largest - found.x) < AT_BOUND):
        raise RuntimeError(f"a parameter is at its bound: {np.exp(found.x)}")
    engines = _engines(np.exp(found.x), kind)
    sync_s = brentq(partial(_sync_error, engines), 0.0, LARGEST_SYNC_S)
    return {**engines, "ft": replace(engines["ft"], sync_s=float(sync_s))}


def errors(engines: dict[str, Gpu]) -> list[tuple[str, float]]:
    """Returns each point of Figure 9 by name, with its error: the logarithm of the predicted time
    divided by the paper's time."""
    one_stage = MODELS["101B"]
    result = []
    for (engine, n_prompt), times_ms in FIGURE_9B_MS.items():
        costs = GpuCosts(one_stage, engines[engine])
        for batch_size, time_ms in zip(BATCH_SIZES, times_ms, strict=False):
            error = math.log(1e3 * batch_s(costs, batch_size, n_prompt) / time_ms)
            result.append((f"9b {engine}({n_prompt}), batch of {batch_size}", error))
    costs = GpuCosts(MODELS["175B"], engines["orca"])
    per_token_ms = 1e3 * batch_s(costs, BATCH_SIZES[-1], 128) / N_OUTPUT
    result.append(("9c orca(128), batch of 32", math.log(per_token_ms / FIGURE_9C_MS_PER_TOKEN)))
    return result


def rms(values: list[float]) -> float:
    """Returns the root mean square of `values`."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def _engines(parameters: npt.NDArray[np.float64], kind: str) -> dict[str, Gpu]:
    bandwidth, free, request_s, ft_layer_s, ft_request_s = map(float, parameters)
    products, pair_s = (free, 0.0) if kind == NO_PAIRS else (PEAK_PRODUCTS, free)
    orca = Gpu(LAYER_S, bandwidth, products, request_s, pair_s)
    return {"orca": orca, "ft": replace(orca, layer_s=ft_layer_s, request_s=ft_request_s)}


def _sync_error(engines: dict[str, Gpu], sync_s: float) -> float:
    ft = replace(engines["ft"], sync_s=sync_s)
    return slowest_to_fastest(MODELS["175B"], ft, engines["orca"]) - FIGURE_9C_FASTER


def slowest_to_fastest(model: PaperModel, one: Gpu, other: Gpu) -> float:
    """Returns the largest ratio, over the batches of Figure 9, of the time with `one` to the time
    with `other`."""
    return max(
        batch_s(GpuCosts(model, one), batch_size, n_prompt)
        / batch_s(GpuCosts(model, other), batch_size, n_prompt)
        for batch_size in BATCH_SIZES
        for n_prompt in (32, 128)
    )
