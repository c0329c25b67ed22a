"""The tuner: calibrates layouts, predicts, and checks the best by running them, in limited time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import ByteSize

from services.common.cpus import usable_cpus
from services.local.settings import LocalSettings
from services.tune import memory
from services.tune.calibration import Calibration, calibrate, iterations_of
from services.tune.check import Check, check
from services.tune.layout import Layout, layouts
from services.tune.model_shape import ModelShape
from services.tune.probe import Probe
from services.tune.search import (
    EQUAL,
    Candidate,
    Memory,
    Prediction,
    Predictor,
    best_of,
    search,
)
from services.tune.settings import TuneSettings
from services.tune.system import Record, SystemFailed, running
from services.tune.workload import Workload

PROBE_S = 14.0
"""Time for the load that calibrates a layout, at most."""
GLANCE_S = 4.0
"""Time after which it is known whether a layout can win at all."""
HOPELESS = 0.75
"""A layout that promises less than this part of the best is not calibrated further."""
CHECK_S = (6.0, 25.0)
"""Time for running a candidate, at least and at most."""
STOP_S = 2.0
"""Time to stop a system."""
FIRST_START_S = 10.0
"""Guessed time to start a system, until one has been started."""
WORTH_CHECKING = 0.85
"""A candidate that promises less than this part of the best is not run."""
PROBE_BATCH_SIZE, PROBE_BATCH_TOKENS = 128, 2048
PROBE_KV_BYTES = 2**30
N_CHECKS = 3
HEAD_ROOM = 1.5
"""K/V slots over those that the workload has reserved at most."""
SLACK_S = 60.0
"""Time over which anything that hangs is given up."""
DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS = 32, 512
ARRIVALS_PART = 0.7
"""Part of the time of a check in which requests arrive, where they have times."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """A layout that was calibrated, and the best that can be had with it."""

    layout: Layout
    calibration: Calibration
    predictor: Predictor
    best: Prediction
    kv_bytes_per_slot: float
    """Of each rank."""
    max_slots: int
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found."""

    chosen: Prediction
    tried: Sequence[Tried]
    checks: dict[Candidate, Check]
    kv_memory: int
    """Bytes for each rank."""
    not_tried: Sequence[str]
    """Layouts that there was no time for, or that do not run, and why."""
    seconds: float

    @property
    def of_chosen(self) -> Tried:
        """The layout of what was chosen."""
        return next(each for each in self.tried if each.layout == self.chosen.candidate.layout)


class Tuner:
    """One run of the tuner."""

    def __init__(
        self, settings: TuneSettings, shape: ModelShape, workload: Workload, *, say: Say
    ) -> None:
        """`say` is told how far it is."""
        self._settings = settings
        self._shape = shape
        self._workload = workload
        self._say = say
        self._n_cpus = usable_cpus()
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._start_s = FIRST_START_S
        self._available = memory.available_bytes()

    async def run(self) -> Tuned:
        """Finds the settings.

        Raises:
            SystemFailed: no layout runs.
        """
        tried: list[Tried] = []
        not_tried: list[str] = []
        for layout in layouts(
            self._n_cpus,
            max_ranks=self._settings.max_ranks,
            n_layers=self._shape.n_layers,
            n_kv_heads=self._shape.n_kv_heads,
        ):
            if tried and self._left_s < self._layout_s + 2 * self._least_check_s:
                not_tried.append(f"{layout}: there was no time to try it")
                continue
            try:
                best = best_of([each.best for each in tried]) if tried else None
                tried.append(await self._try(layout, best))
            except SystemFailed as error:
                if not tried and layout.stages == layout.tp == 1:
                    raise
                not_tried.append(f"{layout}: {error}")
        checks = await self._check(tried)
        chosen = choose(tried, checks)
        of_chosen = next(each for each in tried if each.layout == chosen.candidate.layout)
        return Tuned(
            chosen=chosen,
            tried=tried,
            checks=checks,
            kv_memory=self._kv_memory(of_chosen, chosen),
            not_tried=not_tried,
            seconds=self._clock() - self._began_s,
        )

    @property
    def _left_s(self) -> float:
        return self._settings.budget_s - (self._clock() - self._began_s)

    @property
    def _layout_s(self) -> float:
        return self._start_s + PROBE_S + STOP_S

    @property
    def _least_check_s(self) -> float:
        return self._start_s + CHECK_S[0] + STOP_S

    async def _try(self, layout: Layout, best: Prediction | None) -> Tried:
        """Calibrates a layout, and finds the best that can be had with it. One that promises too
        much less than `best` gets less time."""
        n_ranks = layout.stages * layout.tp
        kv_memory = min(PROBE_KV_BYTES, self._max_kv_bytes(layout))
        began_s = self._clock()
        settings = self._local(
            Candidate(layout, PROBE_BATCH_SIZE, PROBE_BATCH_TOKENS), kv_memory=kv_memory
        )
        self._say(f"{layout}: calibrating")
        is_hopeless = False
        async with self._limited(PROBE_S), running(settings) as system:
            self._start_s = self._clock() - began_s
            probe = Probe(
                system,
                vocab_size=self._shape.vocab_size,
                max_model_len=self._shape.max_model_len,
                max_group=PROBE_BATCH_SIZE,
            )
            async with system.recorded() as records:
                await probe.run(GLANCE_S)
            found = self._calibrated(layout, records, probe, kv_memory)
            if best is not None:
                as_best = replace(best.candidate, layout=layout)
                glance = await asyncio.to_thread(found.predictor, as_best)
                is_hopeless = glance.value < HOPELESS * best.value
            limit_s = min(PROBE_S - GLANCE_S, self._left_s - 2 * self._least_check_s)
            if not is_hopeless and limit_s > 0:
                async with system.recorded() as more:
                    await probe.run(limit_s)
                found = self._calibrated(layout, [*records, *more], probe, kv_memory)
        # In a thread: it takes seconds, and this process has children to hear from.
        predicted = await asyncio.to_thread(
            search, layout, found.predictor, n_requests=len(self._workload.lengths)
        )
        self._say(
            f"{layout}: {found.calibration.n_iterations} iterations fitted within "
            f"{found.calibration.error:.1%} ({n_ranks} rank{'s'[: n_ranks > 1]}); best predicted: "
            f"{predicted.value:.4g} {self._workload.unit}"
        )
        return Tried(
            layout,
            found.calibration,
            found.predictor,
            predicted,
            found.kv_bytes_per_slot,
            found.max_slots,
            is_hopeless,
        )

    def _calibrated(
        self, layout: Layout, records: Sequence[Record], probe: Probe, kv_memory: int
    ) -> "_Found":
        if not records:
            raise SystemFailed("it reported no iterations")
        calibration = calibrate(iterations_of(records), probe.lone)
        bytes_per_slot = kv_memory / records[0].n_slots
        max_slots = int(self._max_kv_bytes(layout) / bytes_per_slot)
        predictor = Predictor(calibration.costs, self._workload, Memory(max_slots))
        return _Found(calibration, predictor, bytes_per_slot, max_slots)

    async def _check(self, tried: Sequence[Tried]) -> dict[Candidate, Check]:
        """Runs the candidates that promise most, and the defaults."""
        checks: dict[Candidate, Check] = {}
        wanted = self._to_check(tried)
        for index, candidate in enumerate(wanted):
            n_after = len(wanted) - index - 1
            limit_s = (self._left_s - n_after * self._least_check_s) - self._start_s - STOP_S
            if limit_s < CHECK_S[0]:
                break
            of_layout = next(each for each in tried if each.layout == candidate.layout)
            self._say(f"{candidate}: running it")
            with contextlib.suppress(SystemFailed):  # what does not run is not chosen
                checks[candidate] = await self._check_one(
                    of_layout, candidate, limit_s=min(limit_s / (1 + n_after / 2), CHECK_S[1])
                )
        return checks

    def _to_check(self, tried: Sequence[Tried]) -> list[Candidate]:
        ranked = sorted(tried, key=lambda each: -each.best.value)
        first = ranked[0].best
        wanted = [first.candidate]
        default = Candidate(Layout(1, 1, self._n_cpus), DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS)
        if any(each.layout == default.layout for each in tried):
            wanted.append(default)
        wanted += [
            each.best.candidate
            for each in ranked[1:]
            if each.best.value >= WORTH_CHECKING * first.value
        ]
        return list(dict.fromkeys(wanted))[:N_CHECKS]

    async def _check_one(self, tried: Tried, candidate: Candidate, *, limit_s: float) -> Check:
        prediction = tried.predictor(candidate)
        kv_memory = self._kv_memory(tried, prediction)
        began_s = self._clock()
        async with (
            self._limited(limit_s),
            running(self._local(candidate, kv_memory=kv_memory)) as system,
        ):
            self._start_s = self._clock() - began_s
            simulation = tried.predictor.simulation(candidate, rate=prediction.rate)
            arrivals = list(simulation.arrivals)
            if prediction.rate is not None:
                arrivals = [each for each in arrivals if each.time_s <= ARRIVALS_PART * limit_s]
                simulation = tried.predictor.simulation(candidate, arrivals=arrivals)
            # Other prompts than those of the probe, whose blocks nobody has.
            of_prompts = random.Random(self._settings.seed + 1)
            prompts = [
                [of_prompts.randrange(self._shape.vocab_size) for _ in range(each.n_prompt)]
                for each in arrivals
            ]
            return await check(
                system,
                self._workload,
                simulation,
                list(zip(arrivals, prompts, strict=True)),
                limit_s=limit_s,
            )

    def _kv_memory(self, tried: Tried, prediction: Prediction) -> int:
        """Returns the bytes for each rank: with head room over what was reserved, and enough for
        the longest request that the model can take."""
        n_slots = max(
            int(HEAD_ROOM * prediction.outcome.max_reserved_slots), self._shape.max_model_len
        )
        wanted = memory.rounded(n_slots * tried.kv_bytes_per_slot)
        return min(wanted, self._max_kv_bytes(tried.layout))

    def _max_kv_bytes(self, layout: Layout) -> int:
        """Returns the bytes that each rank of a layout may have for keys and values."""
        n_ranks = layout.stages * layout.tp
        together = self._settings.max_kv_memory or memory.kv_bytes(
            self._available, n_weight_bytes=self._shape.n_weight_bytes, n_ranks=n_ranks
        )
        return int(together) // n_ranks

    def _local(self, candidate: Candidate, *, kv_memory: int) -> LocalSettings:
        settings, layout = self._settings, candidate.layout
        return LocalSettings(
            model=settings.model,
            stages=layout.stages,
            tp=layout.tp,
            threads=layout.threads,
            max_batch_size=candidate.max_batch_size,
            max_batch_tokens=candidate.max_batch_tokens,
            kv_memory=ByteSize(kv_memory),
            load_format=settings.load_format,
            dtype=settings.dtype,
            quantization=settings.quantization,
            worker=settings.worker,
            http_port=0,
            grpc_port=0,
            fail_fast=True,
            log_level="ERROR",
        )

    @contextlib.asynccontextmanager
    async def _limited(self, limit_s: float) -> AsyncIterator[None]:
        """Gives up what takes far longer than it may."""
        try:
            async with asyncio.timeout(limit_s + self._start_s + SLACK_S):
                yield
        except TimeoutError:
            raise SystemFailed("it hangs") from None


@dataclass(frozen=True, slots=True)
class _Found:
    """A calibration, and the memory that goes with it."""

    calibration: Calibration
    predictor: Predictor
    kv_bytes_per_slot: float
    max_slots: int


def choose(tried: Sequence[Tried], checks: dict[Candidate, Check]) -> Prediction:
    """Returns the best of what was run, by what it then reached; without a run, the best that was
    predicted."""
    predictions = [
        each.predictor(candidate)
        for candidate in checks
        for each in tried
        if each.layout == candidate.layout
    ]
    if not predictions:
        return best_of([each.best for each in tried])
    reached = {each.candidate: each.value * checks[each.candidate].ratio for each in predictions}
    highest = max(reached.values())
    equal = [each for each in predictions if reached[each.candidate] >= (1 - EQUAL) * highest]
    return min(equal, key=lambda each: each.latency_s)
