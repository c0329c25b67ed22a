"""Runs a real system on this machine, and a client that sends each request at its time of arrival.
Ranks compute a model, or sleep for the time that they would take on another machine."""

import asyncio
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ByteSize

from services.arena.entrants import DEFAULT_ORDER, DEFAULT_POLICY, Entrant
from services.arena.figures import Figures
from services.arena.referee import Stopped
from services.arena.scheduler import FILES, REPORT
from services.arena.setup import Setup
from services.arena.sleeping.machine_here import VARIABLE
from services.common.by_model import for_all
from services.common.cpus import usable_cpus
from services.local.settings import LocalSettings
from services.tune.calibration import Calibration, calibrate, costs_of_run, iterations_of
from services.tune.check import outcome_of, run_load
from services.tune.model_shape import ModelShape
from services.tune.probe import Probe
from services.tune.search import Memory
from services.tune.system import (
    Prompt,
    Record,
    System,
    SystemFailed,
    TimedReply,
    TuneLauncher,
    running,
)
from simulator.costs import LinearCosts
from simulator.engine import Arrival
from simulator.outcome import Outcome

KV_BYTES = 2**29
SLEEPING_MAX_LEN = 16_384
"""Longest sequence, in tokens, of a system whose ranks sleep."""
SPARE_S, SPARE_FACTOR = 120.0, 3.0
"""A run fails if it takes longer than `SPARE_FACTOR` times its duration in virtual time plus
`SPARE_S` seconds."""


class ArenaLauncher(TuneLauncher):
    """A launcher of a system whose scheduler checks each batch and writes a report."""

    scheduler_module = "services.arena.scheduler"


class SleepingLauncher(ArenaLauncher):
    """A launcher of a system whose ranks sleep."""

    worker_module = "services.arena.sleeping.rank"


@dataclass(frozen=True, slots=True)
class Place:
    """The settings of the real system on which the entrants run. The policy and the order come from
    each entrant."""

    model: Path
    """Directory of the checkpoint. If ranks sleep, only its tokenizer and its sizes are read."""
    sleeping: str | None
    """Name of the machine that sleeping ranks imitate. None if ranks compute the model."""
    stages: int
    max_batch_size: int
    max_batch_tokens: int
    n_slots: int | None = None
    """Number of K/V slots; None for all that fit into `KV_BYTES`."""
    is_optimistic: bool = False
    """Whether a request reserves less K/V memory than it may need. Then some requests are
    preempted."""
    files: Sequence[Path] = ()
    """Files that define policies or orders."""

    @property
    def way(self) -> str:
        """The value of `Result.way` for runs of this system: `real` or `sleeping`."""
        return "real" if self.sleeping is None else "sleeping"

    @property
    def launcher(self) -> type[ArenaLauncher]:
        """The class of the launcher that starts this system."""
        return ArenaLauncher if self.sleeping is None else SleepingLauncher

    def shape(self) -> ModelShape:
        """Returns the sizes of the model.

        Raises:
            ValueError: a size is missing.
        """
        return ModelShape.read(self.model)

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self.shape().max_model_len if self.sleeping is None else SLEEPING_MAX_LEN

    def settings(self, entrant: Entrant) -> LocalSettings:
        """Returns the settings of this system with the policy and the order of an entrant."""
        return LocalSettings(
            model=for_all(self.model),
            stages=self.stages,
            threads=max(1, usable_cpus() // self.stages),
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=None if self.sleeping is None else SLEEPING_MAX_LEN,
            kv_memory=ByteSize(KV_BYTES),
            prefix_cache=False,
            http_port=0,
            grpc_port=0,
            fail_fast=True,
            scheduler=tuple(self._scheduler_options(entrant)),
        )

    def _scheduler_options(self, entrant: Entrant) -> Iterator[tuple[str, str]]:
        yield "policy", entrant.policy
        yield "order", entrant.order
        yield "speculative-tokens", "0"
        yield "admission", "optimistic" if self.is_optimistic else "reserve"
        if self.n_slots is not None:
            yield "n-slots", str(self.n_slots)

    def prepare(self, report: Path) -> None:
        """Sets the environment variables of the processes that are started later. `report` is the
        file that the scheduler writes."""
        os.environ[FILES] = os.pathsep.join(map(str, self.files))
        os.environ[REPORT] = str(report)
        if self.sleeping is not None:
            os.environ[VARIABLE] = self.sleeping


@dataclass(frozen=True, slots=True)
class RealRun:
    """The result of a run of an entrant on a real system."""

    figures: Figures
    """Figures as the client measures them."""
    costs: LinearCosts
    """Costs that were fitted to the iterations of this run. They do not include the time that
    requests spend outside of iterations."""


async def calibrated(
    system: System, shape: ModelShape, *, max_batch_size: int, limit_s: float
) -> tuple[Calibration, Memory]:
    """Runs a load of `limit_s` seconds on a system. Returns the measured costs of iterations, and
    the size of the K/V memory.

    Raises:
        SystemFailed: a request failed, or no iterations were reported.
    """
    probe = Probe(
        system,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        max_group=max_batch_size,
    )
    async with system.recorded() as first:
        await probe.begin()
    if not first:
        raise SystemFailed("it reported no iterations")
    probe.note_slots(system.n_slots)
    async with system.recorded() as records:
        await probe.run(limit_s)
    return calibrate(iterations_of(records), probe.lone), Memory(system.n_slots)


def measured_setup(place: Place, *, limit_s: float) -> Setup:
    """Starts the system and measures it with a load of `limit_s` seconds. Returns a setup with the
    measured costs and the system's K/V memory.

    Raises:
        SystemFailed: the system does not start, or a request failed.
    """

    async def measure() -> tuple[Calibration, Memory]:
        entrant = Entrant(DEFAULT_POLICY, DEFAULT_ORDER)
        async with running(place.settings(entrant), place.launcher) as system:
            shape, size = place.shape(), place.max_batch_size
            return await calibrated(system, shape, max_batch_size=size, limit_s=limit_s)

    with TemporaryDirectory() as scratch:
        place.prepare(Path(scratch, "report.json"))
        calibration, memory = asyncio.run(measure())
    return Setup(
        calibration.costs,
        memory.n_slots,
        max_batch_size=place.max_batch_size,
        max_batch_tokens=place.max_batch_tokens,
        block_size=memory.block_size,
        is_optimistic=place.is_optimistic,
    )


def run(
    entrant: Entrant, place: Place, arrivals: Sequence[Arrival], *, expected_s: float, seed: int
) -> RealRun:
    """Runs an entrant on a real system. `expected_s` is the duration of the run in virtual time.

    Raises:
        Stopped: the policy broke a rule.
        SystemFailed: the system does not start, a request failed, or the run takes too long.
    """
    limit_s = SPARE_FACTOR * expected_s + SPARE_S
    with TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        place.prepare(report)
        try:
            outcome, records = asyncio.run(_outcome(entrant, place, arrivals, limit_s, seed))
        except SystemFailed:
            told = _told(report)
            if "stopped" in told:
                raise Stopped(told["stopped"]) from None
            raise
        told = _told(report)
    figures = Figures.of(
        outcome, n_preemptions=told.get("n_preemptions"), select_us=told.get("select_us")
    )
    return RealRun(figures, costs_of_run(iterations_of(records)))


async def _outcome(
    entrant: Entrant, place: Place, arrivals: Sequence[Arrival], limit_s: float, seed: int
) -> tuple[Outcome, list[Record]]:
    """Returns the outcome of a run as the client measures it, and the records of its iterations."""
    chance = random.Random(f"prompts {seed}")
    vocabulary = range(place.shape().vocab_size)
    load = [
        (one.time_s, Prompt(chance.choices(vocabulary, k=one.n_prompt), one.n_output))
        for one in arrivals
    ]
    async with running(place.settings(entrant), place.launcher) as system:
        await system.ask(Prompt([1, 2, 3, 4], 2))  # sets up connections and buffers
        async with system.recorded() as records:
            replies, start_s = await run_load(system, load, limit_s=limit_s)
    if not all(reply.is_complete for _, reply in replies):
        raise SystemFailed(f"{entrant.name}: not all requests have ended after {limit_s:.0f} s")
    outcome = _with_gaps(outcome_of(replies, start_s), [reply for _, reply in replies])
    return outcome, records


def _with_gaps(outcome: Outcome, replies: Sequence[TimedReply]) -> Outcome:
    gaps_s = [after - before for one in replies for before, after in pairwise(one.token_times_s)]
    return Outcome(outcome.requests, outcome.n_output, outcome.duration_s, gaps_s=gaps_s)


def _told(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return found
