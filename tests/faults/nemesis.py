"""Draws faults by a seed, and injects each in the phase that it is for.

Between most of them the system recovers. `during recovery` means the time before that, `joining`
the part of it in which stages form a pipeline; `draining`, the seconds after SIGTERM to a scheduler
or a frontend.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from tests.faults.client import Log
from tests.faults.tree import LINKS, MODULES, Role, Shape, Tree

Kind = Literal[
    "kill", "stop 3 s", "stop 12 s", "terminate", "cut 3 s", "silence 3 s", "silence 12 s"
]
Phase = Literal["prefill", "decode", "draining", "joining", "during recovery"]
PROCESS_FAULTS: list[Kind] = ["kill", "kill", "kill", "stop 3 s", "stop 12 s"]
LINK_FAULTS: list[Kind] = ["cut 3 s", "silence 3 s", "silence 12 s"]
ALL_KINDS = sorted({*PROCESS_FAULTS, *LINK_FAULTS})
PHASES: list[Phase] = list(get_args(Phase))
ROLES: list[Role] = list(get_args(Role))

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}

POLL_S = 0.02
UNDER_WAY_S = 1.0
"""Seconds after a fault in which tokens still come that were made before it."""
PHASE_TIMEOUT_S = 15.0
"""Seconds to wait for a phase; then the fault is injected as it is, and reported so."""
RECOVERY_LIMIT_S = 90.0


class NoRecovery(Exception):
    """Raised when the system does not serve again in time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its kind, the role of the process that it hits, and its time."""

    role: Role
    index: int
    kind: Kind
    phase: Phase


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault as it was injected."""

    fault: Fault
    time_s: float
    in_phase: bool
    """Whether the phase came in time."""


def draw_faults(
    random: Random,
    n_faults: int,
    shape: Shape,
    *,
    kinds: Collection[str] = ALL_KINDS,
    phases: Collection[str] = PHASES,
) -> list[Fault]:
    """Returns random faults of some kinds and phases, divided evenly among the phases and among the
    roles that have such faults.

    Raises:
        ValueError: there is no fault of these kinds, or no such phase.
    """
    of_roles = {
        role: [kind for kind in (LINK_FAULTS if role in LINKS else PROCESS_FAULTS) if kind in kinds]
        for role in ROLES
    }
    roles = [role for role in ROLES if of_roles[role]]
    drawn_phases = [phase for phase in PHASES if phase in phases]
    if not roles or not drawn_phases:
        raise ValueError(f"kinds are {ALL_KINDS}, and phases are {PHASES}")
    faults = []
    for number in range(n_faults):
        role = roles[number % len(roles)]
        faults.append(
            Fault(
                role,
                random.randrange(shape.n_of(role)),
                random.choice(of_roles[role]),
                drawn_phases[(number + number // len(roles)) % len(drawn_phases)],
            )
        )
    random.shuffle(faults)
    return faults


class Nemesis:
    """Harms a tree, while clients write to a log."""

    def __init__(
        self,
        tree: Tree,
        log: Log,
        random: Random,
        *,
        recovery_limit_s: float = RECOVERY_LIMIT_S,
    ) -> None:
        self.injected: list[Injected] = []
        self.epochs: list[int] = []
        """Epochs that have served, as they were seen."""
        self._tree = tree
        self._log = log
        self._random = random
        self._recovery_limit_s = recovery_limit_s
        self._lasting: set[asyncio.Task[None]] = set()

    async def run(self, faults: list[Fault], tell: Callable[[str], None]) -> None:
        """Injects the faults one after the other.

        Raises:
            NoRecovery: the system does not serve again.
        """
        await self._until_recovered()
        for number, fault in enumerate(faults, 1):
            begun_s = time.monotonic()
            in_phase = await self._reach(fault.phase)
            await self._inject(fault, in_phase=in_phase)
            await self._until_recovered()
            took_s = time.monotonic() - begun_s
            tell(f"{number}/{len(faults)} {fault.role} {fault.index}, {fault.kind}, "
                 f"{fault.phase}: {took_s:.1f} s, epoch {self.epochs[-1]}")  # fmt: skip
            await asyncio.sleep(self._random.uniform(0.1, 0.8))

    async def _reach(self, phase: Phase) -> bool:
        """Waits for a phase, or causes the phase by a fault. Returns whether the phase was
        reached."""
        match phase:
            case "decode":
                return await self._until(self._are_decoding)
            case "prefill":
                n_begun = self._log.n_begun
                return await self._until(lambda: self._log.n_begun > n_begun)
            case "draining":
                role: Role = self._random.choice(["scheduler", "frontend"])
                await self._inject(Fault(role, 0, "terminate", "decode"), in_phase=True)
                await asyncio.sleep(self._random.uniform(0.1, 1.5))
            case "joining":
                worker = self._random.randrange(self._tree.shape.n_of("controller"))
                await self._inject(Fault("controller", worker, "kill", "decode"), in_phase=True)
                await asyncio.sleep(0.2)  # until the launcher has seen it
                # Its ranks load for some seconds, then it joins within a fraction of one.
                has_begun = await self._until(self._tree.has_all_processes)
                await asyncio.sleep(self._random.uniform(0.0, 4.0))
                return has_begun
            case "during recovery":
                role = self._random.choice(list(MODULES))
                index = self._random.randrange(self._tree.shape.n_of(role))
                await self._inject(Fault(role, index, "kill", "decode"), in_phase=True)
                await asyncio.sleep(self._random.uniform(0.0, 5.0))
        return True

    def _are_decoding(self) -> bool:
        """Returns whether most streams that have begun got a token just now."""
        since_s = time.monotonic() - 0.3
        n_just_now = sum(time_s > since_s for time_s in self._log.decoding.values())
        return n_just_now > len(self._log.decoding) / 2

    async def _until(self, is_reached: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        while not is_reached():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _inject(self, fault: Fault, *, in_phase: bool) -> None:
        """Disturbs a link, or signals the process that has the role as soon as there is one."""
        what, _, for_s = fault.kind.removesuffix(" s").partition(" ")
        lasting: Coroutine[None, None, None] | None = None
        pid = None
        if fault.role not in LINKS:
            pid = await self._pid_of(fault)
        self.injected.append(Injected(fault, time.monotonic(), in_phase))
        if pid is None:
            lasting = self._tree.disturb(fault.role, fault.index, what, float(for_s))
        else:
            self._tree.signal(pid, SIGNALS[what])
            if for_s:
                lasting = self._wake(pid, float(for_s))
        if lasting is not None:
            task = asyncio.create_task(lasting)
            self._lasting.add(task)
            task.add_done_callback(self._lasting.discard)

    async def _pid_of(self, fault: Fault) -> int:
        """Returns the process that has the role, as soon as there is one.

        Raises:
            NoRecovery: there is none for too long.
        """
        deadline = time.monotonic() + self._recovery_limit_s
        while (pid := self._tree.pid(fault.role, fault.index)) is None:
            if time.monotonic() > deadline:
                raise NoRecovery(f"no {fault.role} {fault.index}, after {self.injected[-1:]}")
            await asyncio.sleep(POLL_S)
        return pid

    async def _wake(self, pid: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._tree.signal(pid, signal.SIGCONT)

    async def _until_recovered(self) -> None:
        """Waits until all processes are there, all pipelines serve, spares wait, and all streams
        that have begun go on.

        Raises:
            NoRecovery: it takes too long.
        """
        deadline = time.monotonic() + self._recovery_limit_s
        await asyncio.gather(*self._lasting)  # raises what one of them has
        since_s = time.monotonic()
        if self.injected:  # what was under way is not news
            since_s = max(since_s, self.injected[-1].time_s + UNDER_WAY_S)
        while True:
            await asyncio.sleep(0.2)
            epoch = await asyncio.to_thread(self._tree.epoch)
            oldest_s = min(self._log.decoding.values(), default=0.0)
            if (
                epoch is not None
                and oldest_s > since_s
                and self._tree.has_all_processes()
                and await asyncio.to_thread(self._tree.has_all_workers)
            ):
                self.epochs.append(epoch)
                return
            if time.monotonic() > deadline:
                raise NoRecovery(f"epoch {epoch}, after {self.injected[-1:]}")
