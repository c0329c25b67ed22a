"""A lease in memory, and stores that access it. Calls of a store can be delayed, lost or
refused."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat

from services.scheduler.cluster.lease import LeaseConflict, LeaseRecord, LeaseUnavailable

FOREVER = 1e6


@dataclass(frozen=True)
class Fate:
    """What happens to a call of a store: its delays, whether it reaches the lease, and whether the
    caller gets an answer."""

    request_s: float = 0.01
    answer_s: float = 0.01
    arrives: bool = True
    is_answered: bool = True


GOOD = Fate()
HUNG = Fate(answer_s=FOREVER)
REFUSED = Fate(arrives=False, is_answered=False)
ANSWER_LOST = Fate(is_answered=False)


@dataclass
class Lease:
    """A lease that all stores share. At first it is free: its last holder has released it."""

    record: LeaseRecord = field(
        default_factory=lambda: LeaseRecord("", 0, 0, "1", is_released=True)
    )
    n_writes: int = 1

    def delete(self) -> None:
        """Deletes the lease without telling the stores."""
        self.record = LeaseRecord("", 0, 0, "")

    def edit(self, **changes: object) -> None:
        """Changes the lease without telling the stores."""
        self.n_writes += 1
        version = str(self.n_writes)
        self.record = replace(self.record, **{"version": version} | changes)  # type: ignore[arg-type]

    def put(self, record: LeaseRecord) -> LeaseRecord:
        """Replaces the record of the lease and returns the new record. If `record` equals the
        present record, nothing changes. Raises LeaseConflict if the version of `record` is not the
        present one."""
        if record.version != self.record.version:
            raise LeaseConflict
        if record != self.record:
            self.n_writes += 1
            self.record = replace(record, version=str(self.n_writes))
        return self.record


class MemoryLeaseStore:
    """A store that accesses the shared lease. `fates` says what happens to each call. A call
    continues even if its caller is cancelled."""

    def __init__(self, lease: Lease, fates: Iterable[Fate] = repeat(GOOD)) -> None:
        self.lease = lease
        self.fates: Iterator[Fate] = iter(fates)
        self.n_calls = 0
        self.refuses_writes = False
        self._calls: set[asyncio.Task[LeaseRecord | Exception]] = set()

    async def read(self) -> LeaseRecord:
        return await self._call(lambda: self.lease.record)

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        if self.refuses_writes:
            raise LeaseUnavailable("no right to update")
        return await self._call(lambda: self.lease.put(record))

    async def _call(self, operation: Callable[[], LeaseRecord]) -> LeaseRecord:
        self.n_calls += 1
        fate = next(self.fates, GOOD)
        call = asyncio.create_task(self._travel(operation, fate))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        result = await asyncio.shield(call)
        if isinstance(result, Exception):
            raise result
        return result

    async def _travel(
        self, operation: Callable[[], LeaseRecord], fate: Fate
    ) -> LeaseRecord | Exception:
        result: LeaseRecord | Exception = LeaseUnavailable("no way there")
        await asyncio.sleep(fate.request_s)
        if fate.arrives:
            try:
                result = operation()
            except LeaseConflict as conflict:
                result = conflict
        await asyncio.sleep(fate.answer_s)
        return result if fate.is_answered else LeaseUnavailable("no way back")
