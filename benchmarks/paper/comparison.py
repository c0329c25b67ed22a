"""The comparison of predictions with measurements: its cases, the predicted and measured figures of
each case, and the table, the record and the plot. `predict.py` runs the cases."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from matplotlib.figure import Figure
from pydantic import ByteSize

from benchmarks.plots import MARKERS
from benchmarks.records import RunRecord
from services.common.by_model import for_all
from services.common.cpus import usable_cpus
from services.local.settings import LocalSettings
from services.tune.calibration import Calibration
from services.tune.layout import Layout
from services.tune.search import Candidate
from simulator.outcome import Outcome, percentile

PolicyName = Literal["orca", "chunked"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
MAX_BATCH_SIZE, MAX_BATCH_TOKENS = 32, 512
KV_BYTES = 2**29
FIGURES = ("tokens_per_s", "median_latency_s", "median_normalised_s", "median_ttft_s", "p99_ttft_s")
COLUMNS = (
    f"{'rate':>6} {'speed':>6}   {'tokens/s':>24}   {'median latency, s':>24}   "
    f"{'first token, s':>24}   {'p99 of it, s':>24}\n{'':>13}"
    + f"   {'real':>6} {'model':>8} {'at speed':>8}"
    * 4
)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of stages, a policy and a number of pipelines, for which results are predicted and
    measured."""

    stages: int
    policy: PolicyName
    pipelines: int = 1

    def __str__(self) -> str:
        name = f"{self.stages} stage{'s'[: self.stages > 1]}, {self.policy}"
        return name if self.pipelines == 1 else f"{self.pipelines} pipelines of {name}"

    @property
    def candidate(self) -> Candidate:
        """One pipeline of this case as the simulator's input. All CPUs are divided evenly among all
        stages of all pipelines."""
        n_stages = self.pipelines * self.stages
        layout = Layout(self.stages, 1, max(1, usable_cpus() // n_stages))
        return Candidate(layout, MAX_BATCH_SIZE, MAX_BATCH_TOKENS)

    def local_settings(self, model: Path) -> LocalSettings:
        """Returns the settings of the local system for this case."""
        candidate = self.candidate
        return LocalSettings(
            model=for_all(model),
            stages=self.stages,
            pipelines=self.pipelines,
            threads=candidate.layout.threads,
            policy=self.policy,
            max_batch_size=candidate.max_batch_size,
            max_batch_tokens=candidate.max_batch_tokens,
            kv_memory=ByteSize(KV_BYTES),
            http_port=0,
            grpc_port=0,
            fail_fast=True,
            scheduler=(("speculative-tokens", "0"), ("admission", "reserve")),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a run, measured or predicted."""

    tokens_per_s: float
    """Output tokens per second, from the first arrival to the last token."""
    median_latency_s: float
    """Seconds from a request's arrival to its last token."""
    median_normalised_s: float
    median_ttft_s: float
    p99_ttft_s: float

    @classmethod
    def predicted(cls, outcome: Outcome) -> "Figures":
        """Returns the results of a simulation."""
        ttfts_s = [request.ttft_s for request in outcome.requests]
        return cls(
            tokens_per_s=outcome.tokens_per_s,
            median_latency_s=statistics.median(
                request.end_s - request.arrival_s for request in outcome.requests
            ),
            median_normalised_s=statistics.median(
                request.normalised_s for request in outcome.requests
            ),
            median_ttft_s=statistics.median(ttfts_s),
            p99_ttft_s=percentile(ttfts_s, 99),
        )

    @classmethod
    def measured(cls, run: RunRecord) -> "Figures":
        """Returns the results of a measured run.

        Raises:
            RuntimeError: a request failed.
        """
        errors = {request.error for request in run.requests} - {None}
        if errors:
            raise RuntimeError(f"requests failed: {sorted(map(str, errors))[0]}")
        ttfts_s = [request.time_to_first_token_s or 0.0 for request in run.requests]
        return cls(
            tokens_per_s=run.summary().output_tokens_per_s,
            median_latency_s=statistics.median(request.latency_s for request in run.requests),
            median_normalised_s=statistics.median(
                request.normalised_latency_s for request in run.requests
            ),
            median_ttft_s=statistics.median(ttfts_s),
            p99_ttft_s=percentile(ttfts_s, 99),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The predicted and the measured results at one rate of arrivals."""

    rate: float
    """Rate of arrivals in requests per second."""
    speed: float
    """Measured time of the run's iterations, divided by the time that the calibrated costs predict
    for them: 2.0 means that the machine was half as fast as during calibration."""
    real: Figures
    model: Figures
    """The results that were predicted before the run."""
    at_speed: Figures
    """The results that are predicted if all costs are multiplied by `speed`."""

    def __str__(self) -> str:
        columns = [f"{self.rate:6.2f} {self.speed:6.2f}"]
        for name in ("tokens_per_s", "median_latency_s", "median_ttft_s", "p99_ttft_s"):
            real, model, at_speed = (
                getattr(each, name) for each in (self.real, self.model, self.at_speed)
            )
            columns.append(f"{real:6.4g} {model / real:7.3f}x {at_speed / real:7.3f}x")
        return "   ".join(columns)


def worst(comparisons: Sequence[Comparison], which: str, figure: str) -> float:
    """Returns the largest relative error of the predictions of `figure`, a field of `Figures`.
    `which` is `model` or `at_speed`."""
    errors: list[float] = [
        abs(getattr(getattr(each, which), figure) / getattr(each.real, figure) - 1)
        for each in comparisons
    ]
    return max(errors)


def draw(path: Path, found: dict[Case, list[Comparison]], *, title: str) -> None:
    """Draws measured and predicted throughput and median latency over the rate of arrivals."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    for index, (case, comparisons) in enumerate(found.items()):
        rates = [each.rate for each in comparisons]
        for axes, name in ((throughput, "tokens_per_s"), (latency, "median_latency_s")):
            for which, line, label in (
                ("real", MARKERS[index], f"{case}: measured"),
                ("model", "-", "predicted beforehand"),
                ("at_speed", "--", "at the machine's speed"),
            ):
                values = [getattr(getattr(each, which), name) for each in comparisons]
                axes.plot(rates, values, line, color=f"C{index}", linewidth=1, label=label)
    throughput.set_ylabel("output tokens/s")
    latency.set_ylabel("median latency (s)")
    latency.set_yscale("log")
    for axes in (throughput, latency):
        axes.set_xlabel("requests/s that come")
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(
        *throughput.get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center"
    )
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def record_of(
    case: Case, calibration: Calibration, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """Returns the record of a case, as a dictionary for JSON."""
    return {
        "pipelines": case.pipelines,
        "stages": case.stages,
        "policy": case.policy,
        "n_iterations": calibration.n_iterations,
        "error_of_fit": round(calibration.error, 4),
        "worst_error": {
            which: {name: round(worst(comparisons, which, name), 4) for name in FIGURES}
            for which in ("model", "at_speed")
        },
        "rates": [
            json.loads(
                json.dumps(dataclasses.asdict(each)),
                parse_float=lambda text: round(float(text), 5),
            )
            for each in comparisons
        ],
    }
