"""The tuner: calibrates layouts, predicts the best settings and runs them, in a limited time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from pydantic import ByteSize

from services.common.by_model import for_all
from services.common.cpus import usable_cpus
from services.local.settings import LocalSettings
from services.tune import memory
from services.tune.calibration import Calibration, MeasuredIteration, calibrate, iterations_of
from services.tune.check import Check, check
from services.tune.choice import Tried, Tuned, check_limits, choose, default_of, to_check
from services.tune.layout import Layout, layouts
from services.tune.model_shape import ModelShape
from services.tune.probe import Lone, Probe
from services.tune.search import Candidate, Memory, Prediction, Predictor, best_of, search
from services.tune.settings import TuneSettings
from services.tune.system import START_TIMEOUT_S, SystemFailed, TuneLauncher, running
from services.tune.workload import Workload
from simulator.engine import Arrival

PROBE_PART, MAX_PROBE_S = 1 / 12, 14.0
"""Time limit for the load that calibrates a layout: a fraction of `budget_s`, and an upper bound in
seconds."""
GLANCE_PART = 0.3
"""Fraction of a calibration's time after which the tuner decides whether a layout is hopeless."""
HOPELESS = 0.75
"""A layout is hopeless if its predicted value is less than this fraction of the best predicted
value."""
CHECK_S = (6.0, 25.0)
"""Least and greatest time limit for running a candidate, in seconds."""
STOP_S = 2.0
"""Expected time to stop a system, in seconds."""
FIRST_START_S = 10.0
"""Expected time to start a system, in seconds, before any system has been started."""
PROBE_BATCH_SIZE, PROBE_BATCH_TOKENS = 128, 2048
PROBE_KV_BYTES = 2**30
N_CHECKS = 3
BLOCK_SIZE = 16
"""Number of K/V slots of a block. A request may take up to a block more than it has tokens."""
HEAD_ROOM = 1.5
"""Number of K/V slots to provide, as a multiple of the largest number that the workload's requests
reserved at any time."""
CHECK_RATE = 0.9
"""Arrival rate at which a candidate is run, as a fraction of its highest predicted rate. At the
highest rate, a machine slightly slower than its model would miss the limits of nearly all
requests."""
SLACK_S = 60.0
"""Seconds beyond the expected time after which a system counts as hung and is stopped."""
PART_OF_LIMIT = 0.8
"""Fraction of a run's time limit. Only the part of the workload is run that should end within this
time or, if requests arrive at a rate, that should arrive within it."""

Say = Callable[[str], None]


class Tuner:
    """Runs the tuner once, from the first layout to the chosen settings."""

    def __init__(
        self,
        settings: TuneSettings,
        shape: ModelShape,
        workload: Workload,
        *,
        say: Say,
        launcher_class: type[TuneLauncher] = TuneLauncher,
    ) -> None:
        """Creates a tuner. `say` is called with lines about progress."""
        self._settings = settings
        self._shape = shape
        self._workload = workload
        self._say = say
        self._launcher_class = launcher_class
        self._n_cpus = usable_cpus()
        self._has_devices = dict(settings.worker).get("device", "cpu") != "cpu"
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._probe_s = min(MAX_PROBE_S, PROBE_PART * settings.budget_s)
        self._start_s = FIRST_START_S
        self._search_s = 0.0
        self._available = memory.available_bytes()

    async def run(self) -> Tuned:
        """Finds the best settings.

        Raises:
            SystemFailed: the model does not run, no settings keep the latency limits, or no
                settings serve requests. On CPUs, where all ranks share the memory, only the first
                layout, which has a single rank, is tried to find out whether the model runs.
        """
        tried: list[Tried] = []
        not_tried: list[str] = []
        for layout in layouts(
            self._n_cpus,
            max_ranks=self._settings.max_ranks,
            n_layers=self._shape.n_layers,
            n_kv_heads=self._shape.n_kv_heads,
        ):
            if (tried or not_tried) and self._left_s < self._layout_s + 2 * self._least_check_s:
                not_tried.append(f"{layout}: there was no time to try it")
                continue
            try:
                best = best_of([each.best for each in tried]) if tried else None
                tried.append(await self._try(layout, best))
            except SystemFailed as error:
                if not tried and not self._has_devices:
                    raise  # all ranks share the memory and the processors of one
                not_tried.append(f"{layout}: {error}")
        if not tried:
            raise SystemFailed(not_tried[0])
        if self._workload.finds_rate:
            check_limits(tried, self._workload)
        checks = await self._check(tried)
        chosen = choose(tried, checks)
        place = next(i for i, each in enumerate(tried) if each.layout == chosen.candidate.layout)
        # The others are compared with the chosen candidate at its own highest rate.
        if self._workload.finds_rate:
            predictor = tried[place].predictor.anew()
            chosen = await in_thread(predictor, predictor, chosen.candidate)
            tried[place] = replace(tried[place], predictor=predictor)
        return Tuned(
            chosen=chosen,
            tried=tried,
            checks=checks,
            kv_memory=self._kv_memory(tried[place], chosen),
            default=default_of(self._n_cpus),
            not_tried=not_tried,
            limits=self._workload.limits,
            seconds=self._clock() - self._began_s,
        )

    @property
    def _left_s(self) -> float:
        return self._settings.budget_s - (self._clock() - self._began_s)

    @property
    def _layout_s(self) -> float:
        return self._start_s + self._probe_s + STOP_S + self._search_s

    @property
    def _least_check_s(self) -> float:
        return self._start_s + CHECK_S[0] + STOP_S

    async def _try(self, layout: Layout, best: Prediction | None) -> Tried:
        """Measures the costs of iterations with a layout, and finds the best settings with this
        layout. `best` is the best prediction for earlier layouts. If the first measurements predict
        a far lower value for this layout, no further ones are made."""
        kv_memory = min(PROBE_KV_BYTES, self._max_kv_bytes(layout))
        began_s = self._clock()
        settings = self.local_settings(
            Candidate(layout, PROBE_BATCH_SIZE, PROBE_BATCH_TOKENS), kv_memory=kv_memory
        )
        self._say(f"{layout}: calibrating")
        is_hopeless = False
        async with self._limited(self._probe_s), running(settings, self._launcher_class) as system:
            self._start_s = self._clock() - began_s
            probe = Probe(
                system,
                vocab_size=self._shape.vocab_size,
                max_model_len=self._shape.max_model_len,
                max_group=PROBE_BATCH_SIZE,
            )
            async with system.recorded() as first:
                await probe.begin()
            if not first:
                raise SystemFailed("it reported no iterations")
            bytes_per_slot = kv_memory / system.n_slots
            self._check_memory(layout, bytes_per_slot)
            probe.note_slots(system.n_slots)
            async with system.recorded() as records:
                await probe.run(GLANCE_PART * self._probe_s)
            if best is not None:
                glance = calibrate(iterations_of(records), probe.lone)
                predict = self._predictor(layout, glance, bytes_per_slot)
                as_best = replace(best.candidate, layout=layout)
                promised = await in_thread(predict, predict, as_best)
                is_hopeless = promised.value < HOPELESS * best.value
            left_s = (1 - GLANCE_PART) * self._probe_s
            if not is_hopeless:
                async with system.recorded() as more:
                    await probe.run(left_s)
                records += more
        found = await self._searched(
            layout, iterations_of(records), probe.lone, bytes_per_slot=bytes_per_slot
        )
        calibration = found.calibration
        self._say(
            f"{layout}: {calibration.n_iterations} iterations fitted within {calibration.error:.1%}"
            f"; best predicted: {found.best.value:.4g} {self._workload.unit}"
        )
        return replace(found, is_hopeless=is_hopeless)

    async def _check(self, tried: list[Tried]) -> dict[Candidate, Check]:
        """Runs the candidates with the best predictions, and the default settings, on a real
        system.

        After a run, the costs in `tried` are fitted again, with the iterations of the run. This may
        change the best settings for a layout, and so the candidate that is run next. If there is
        time either for another run or for fitting, the run takes precedence.
        """
        checks: dict[Candidate, Check] = {}
        for n_after in reversed(range(N_CHECKS)):
            candidate = to_check(tried, checks, default_of(self._n_cpus))
            spare_s = self._left_s - self._least_check_s
            if candidate is None or spare_s < 0:
                break
            another_s = self._least_check_s
            if spare_s >= self._search_s + another_s:
                another_s += self._search_s
            n_after = min(n_after, int(spare_s / another_s))
            limit_s = CHECK_S[0] + spare_s - n_after * another_s
            place = next(i for i, each in enumerate(tried) if each.layout == candidate.layout)
            self._say(f"{candidate}: running it")
            try:
                check = await self._run(
                    tried[place], candidate, limit_s=min(limit_s / (1 + n_after / 2), CHECK_S[1])
                )
            except SystemFailed as error:
                self._say(f"{candidate}: {error}")
                check = Check(0.0, False, (), has_failed=True)
            checks[candidate] = check
            is_another = len(checks) < N_CHECKS and self._left_s >= self._least_check_s
            if self._left_s >= self._search_s + self._least_check_s * is_another:
                tried[place] = await self._refitted(tried[place], check.iterations)
        return checks

    async def _refitted(self, tried: Tried, iterations: Sequence[MeasuredIteration]) -> Tried:
        """Fits the costs of the layout of `tried` again, to `iterations` and to the iterations that
        were measured earlier, and finds the best settings with these costs. Returns `tried` itself
        if `iterations` is empty."""
        if not iterations:
            return tried
        return await self._searched(
            tried.layout,
            [*tried.iterations, *iterations],
            tried.lone,
            bytes_per_slot=tried.kv_bytes_per_slot,
        )

    async def _searched(
        self,
        layout: Layout,
        iterations: Sequence[MeasuredIteration],
        lone: Sequence[Lone],
        *,
        bytes_per_slot: float,
    ) -> Tried:
        """Fits the costs of a layout to measured iterations, and finds the best settings for the
        layout with these costs."""
        calibration = calibrate(iterations, lone)
        predictor = self._predictor(layout, calibration, bytes_per_slot)
        began_s = self._clock()
        find = partial(search, layout, predictor, n_requests=len(self._workload.lengths))
        best = await in_thread(predictor, find)
        self._search_s = self._clock() - began_s
        return Tried(
            layout, calibration, predictor, best, bytes_per_slot, tuple(iterations), tuple(lone)
        )

    def _check_memory(self, layout: Layout, bytes_per_slot: float) -> None:
        """Checks that the K/V memory of a layout suffices for every request of the workload.
        `bytes_per_slot` is the number of bytes of a K/V slot in each rank.

        Raises:
            SystemFailed: the longest request does not fit into the K/V memory.
        """
        n_slots = int(self._max_kv_bytes(layout) / bytes_per_slot)
        needed = self._workload.max_request_len
        if n_slots < needed + BLOCK_SIZE:
            raise SystemFailed(
                f"max_kv_memory: there is room for {n_slots} tokens, and a request has {needed}"
            )

    def _predictor(
        self, layout: Layout, calibration: Calibration, bytes_per_slot: float
    ) -> Predictor:
        n_slots = int(self._max_kv_bytes(layout) / bytes_per_slot)
        return Predictor(calibration.costs, self._workload, Memory(n_slots))

    async def _run(self, tried: Tried, candidate: Candidate, *, limit_s: float) -> Check:
        """Runs the part of the workload that fits into `limit_s` seconds on a real system, and
        compares the result with the prediction.

        Raises:
            SystemFailed: the system did not start, or a request failed.
        """
        predictor = tried.predictor.anew()
        prediction = await in_thread(predictor, predictor, candidate)
        rate = prediction.rate
        if rate is not None and self._workload.finds_rate:
            rate *= CHECK_RATE
        kv_memory = self._kv_memory(tried, prediction)
        began_s = self._clock()
        async with (
            self._limited(limit_s),
            running(
                self.local_settings(candidate, kv_memory=kv_memory), self._launcher_class
            ) as system,
        ):
            self._start_s = self._clock() - began_s
            whole = predictor.simulation(candidate, rate=rate)
            part = part_of(whole.arrivals, prediction, limit_s=limit_s)
            of_prompts = random.Random(self._settings.seed + 1)
            prompts = [
                [of_prompts.randrange(self._shape.vocab_size) for _ in range(each.n_prompt)]
                for each in part
            ]
            return await check(
                system,
                self._workload,
                prediction,
                predictor.simulation(candidate, arrivals=part),
                prompts,
                limit_s=limit_s,
            )

    def _kv_memory(self, tried: Tried, prediction: Prediction) -> int:
        """Returns the number of bytes of K/V memory for each rank. It has `HEAD_ROOM` times the
        slots that the workload reserved, but at least enough for the longest request of the model,
        and at most as much memory as the layout may use."""
        n_slots = max(
            int(HEAD_ROOM * prediction.outcome.max_reserved_slots), self._shape.max_model_len
        )
        wanted = memory.rounded(n_slots * tried.kv_bytes_per_slot)
        return min(wanted, self._max_kv_bytes(tried.layout))

    def _max_kv_bytes(self, layout: Layout) -> int:
        """Returns the largest number of bytes that each rank of a layout may use for keys and
        values."""
        n_ranks = layout.stages * layout.tp
        together = self._settings.max_kv_memory or memory.kv_bytes(
            self._available, n_weight_bytes=self._shape.n_weight_bytes, n_ranks=n_ranks
        )
        return int(together) // n_ranks

    def local_settings(self, candidate: Candidate, *, kv_memory: int) -> LocalSettings:
        """Returns the settings of the system that runs a candidate."""
        settings, layout = self._settings, candidate.layout
        return LocalSettings(
            model=for_all(settings.model),
            stages=layout.stages,
            tp=layout.tp,
            threads=layout.threads,
            max_batch_size=candidate.max_batch_size,
            max_batch_tokens=candidate.max_batch_tokens,
            kv_memory=ByteSize(kv_memory),
            load_format=settings.load_format,
            dtype=settings.dtype,
            quantization=settings.quantization,
            weight_cache="off",  # each layout would leave files of its own
            worker=settings.worker,
            scheduler=(("speculative-tokens", "0"),),  # a decode has one token, without drafts
            http_port=0,
            grpc_port=0,
            fail_fast=True,
            log_level="ERROR",
        )

    @contextlib.asynccontextmanager
    async def _limited(self, limit_s: float) -> AsyncIterator[None]:
        """Limits the time of a block that starts a system and runs a load for about `limit_s`
        seconds.

        Raises:
            SystemFailed: the block has taken far longer than a start and the load should take.
        """
        limit_s += START_TIMEOUT_S + SLACK_S
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise SystemFailed(f"a short load has not ended after {limit_s:.0f} s") from None


async def in_thread(
    predictor: Predictor, function: Callable[..., Prediction], *arguments: object
) -> Prediction:
    """Calls `function` in a thread and returns the prediction that it returns. A thread is needed
    because a prediction takes seconds, in which this process must watch its child processes. If the
    caller is cancelled, the searches of `predictor` are cancelled, so that the thread ends."""
    try:
        return await asyncio.to_thread(function, *arguments)
    except asyncio.CancelledError:
        predictor.give_up()  # the process cannot end before the thread has ended
        raise


def part_of(
    arrivals: Sequence[Arrival], prediction: Prediction, *, limit_s: float
) -> Sequence[Arrival]:
    """Returns the first requests of the workload, at least one. If the requests arrive at a rate,
    these are the requests that arrive within `PART_OF_LIMIT * limit_s` seconds. Otherwise they are
    the requests that, by the prediction, end within this time."""
    limit_s *= PART_OF_LIMIT
    if prediction.rate is not None:
        part = [each for each in arrivals if each.time_s <= limit_s]
    else:
        part = list(arrivals[: int(len(arrivals) * limit_s / prediction.outcome.duration_s)])
    return part or arrivals[:1]
