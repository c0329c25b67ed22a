"""The adapters of one epoch on a rank: orders take their turn, and memory is bounded."""

from dataclasses import dataclass, field

from orcinus.v1 import worker_pb2

from services.worker.models.adapters.adaptable_program import FittedAdapter
from services.worker.rank.adapter_loader import NO_LOADER, LoadEnd, OnEnd
from services.worker.rank.epoch_adapters import NO_RUNNER, EpochAdapters
from tests.worker.rank.test_epoch_member import Runner, member_of, plan


@dataclass
class Loader:
    """A loader whose loads end when the test says so."""

    max_loaded: int = 2
    begun: dict[int, tuple[int, OnEnd]] = field(default_factory=dict)

    def begin(self, order: worker_pb2.AdapterOrder, index: int, on_end: OnEnd) -> None:
        self.begun[order.load_id] = index, on_end

    def end(self, load_id: int, digest: str = "", failure: str = "") -> None:
        """Ends a load well, or with a failure."""
        index, on_end = self.begun.pop(load_id)
        fitted = None if failure else FittedAdapter(digest, index, {})
        on_end(LoadEnd(load_id, fitted, failure))


@dataclass
class Added:
    """A runner that writes down its adapters."""

    indices: dict[str, int] = field(default_factory=dict)

    def add_adapter(self, fitted: FittedAdapter) -> None:
        assert fitted.index not in self.indices.values()
        self.indices[fitted.digest] = fitted.index

    def drop_adapter(self, digest: str) -> None:
        del self.indices[digest]


class Epoch:
    """An epoch's adapters with their loader and runner."""

    def __init__(self, max_loaded: int = 2) -> None:
        self.loader, self.runner = Loader(max_loaded), Added()
        self.adapters = EpochAdapters(self.loader, self.runner, ["fixed"])  # type: ignore[arg-type]

    def order(self, load_id: int = 0, *dropped: int) -> None:
        self.adapters.obey(worker_pb2.AdapterOrder(load_id=load_id, dropped=dropped))

    def reports(self) -> list[tuple[int, str, str]]:
        return [(one.load_id, one.digest, one.failure) for one in self.adapters.take_reports()]


def test_a_loaded_adapter_is_added_and_dropped() -> None:
    epoch = Epoch()
    epoch.order(1)
    assert epoch.adapters.is_loading
    assert epoch.reports() == []
    epoch.loader.end(1, "a")
    assert not epoch.runner.indices  # added between iterations, not by the loader's thread
    assert epoch.reports() == [(1, "a", "")]
    assert epoch.runner.indices == {"a": 1}  # after the fixed one
    assert not epoch.adapters.is_loading
    epoch.order(0, 1)
    assert epoch.runner.indices == {}


def test_loads_in_flight_count_as_well() -> None:
    epoch = Epoch(max_loaded=2)
    for load_id in (1, 2, 3):
        epoch.order(load_id)
    assert set(epoch.loader.begun) == {1, 2}
    assert epoch.reports() == [(3, "", "the workers load no more adapters")]
    epoch.loader.end(1, failure="broken")
    assert epoch.reports() == [(1, "", "broken")]
    epoch.order(4)
    assert set(epoch.loader.begun) == {2, 4}


def test_an_adapter_that_is_dropped_while_it_loads_is_not_added() -> None:
    epoch = Epoch(max_loaded=1)
    epoch.order(1)
    (index, on_end) = epoch.loader.begun[1]
    epoch.order(2, 1)
    epoch.loader.end(2, "b")
    on_end(LoadEnd(1, FittedAdapter("a", index, {})))
    assert epoch.reports() == [(2, "b", "")]
    assert epoch.runner.indices == {"b": 1}


def test_equal_files_are_held_once() -> None:
    epoch = Epoch(max_loaded=3)
    for load_id, digest in ((1, "a"), (2, "a"), (3, "fixed")):
        epoch.order(load_id)
        epoch.loader.end(load_id, digest)
        assert epoch.reports() == [(load_id, digest, "")]
    assert epoch.runner.indices == {"a": 1}
    epoch.order(0, 2, 3)
    assert epoch.runner.indices == {"a": 1}
    epoch.order(0, 1)
    assert epoch.runner.indices == {}
    assert not epoch.adapters.is_loading


def test_an_adapter_is_dropped_with_its_last_load() -> None:
    early, late = Epoch(max_loaded=3), Epoch(max_loaded=3)
    for epoch in (early, late):
        epoch.order(1)
        epoch.loader.end(1, "a")
        epoch.reports()
        epoch.order(2)
    early.loader.end(2, "a")
    assert early.reports() == [(2, "a", "")]
    for epoch in (early, late):
        epoch.order(0, 1)
    late.loader.end(2, "a")
    assert late.reports() == [(2, "a", "")]
    for epoch in (early, late):
        assert set(epoch.runner.indices) == {"a"}
        epoch.order(3)
        epoch.loader.end(3, "b")
        epoch.reports()
        assert len(set(epoch.runner.indices.values())) == 2
        epoch.order(0, 2)
        assert set(epoch.runner.indices) == {"b"}


def test_a_rank_that_loads_nothing_says_so() -> None:
    adapters = EpochAdapters(NO_LOADER, NO_RUNNER)
    adapters.obey(worker_pb2.AdapterOrder(load_id=1, source="/etc"))
    (report,) = adapters.take_reports()
    assert report.failure


def test_an_order_takes_its_turn_after_the_plans_before_it() -> None:
    epoch = Epoch()
    member = member_of(Runner(), None, adapters=epoch.adapters)
    order = worker_pb2.RunIterationsRequest(adapter_order=worker_pb2.AdapterOrder(load_id=1))
    member.announce(plan(1))
    member.announce(plan(2))
    member.announce(order)
    assert member.n_announced == 2
    member.start_next()
    assert not epoch.loader.begun
    member.start_next()
    assert set(epoch.loader.begun) == {1}
    order.adapter_order.load_id = 2
    member.announce(order)
    assert set(epoch.loader.begun) == {1, 2}
