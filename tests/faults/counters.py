"""Counters of processes that are restarted, summed over all lives of a process."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from tests.faults.tree import Tree

PERIOD_S = 0.5


class Counters:
    """Sums of the counters of one kind of service. A restart of a process sets its counters to
    zero, and the sums keep what was counted before, up to the last scrape."""

    def __init__(self, tree: Tree, service: str, names: Sequence[str]) -> None:
        self.totals: Counter[str] = Counter()
        """What was counted, by the name of a metric."""
        self._tree = tree
        self._service = service
        self._names = names
        self._last: Counter[str] = Counter()

    async def scrape_all_the_time(self) -> None:
        """Scrapes periodically, until it is cancelled."""
        while True:
            await asyncio.to_thread(self.scrape)
            await asyncio.sleep(PERIOD_S)

    def scrape(self) -> None:
        """Adds what was counted since the last scrape."""
        for service in self._tree.names_of(self._service):
            samples = self._tree.scrape(service)
            if samples is None:  # being restarted
                continue
            for name in self._names:
                now, key = int(samples.sum(name)), f"{service} {name}"
                before = self._last[key] if now >= self._last[key] else 0
                self.totals[name] += now - before
                self._last[key] = now
