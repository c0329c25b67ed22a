"""Counters and histograms of one thread, beside the library's."""

from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from services.common import own_metrics

BUCKETS = (0.25, 1, 2.5)
NUMBERS = st.one_of(st.sampled_from((0, *BUCKETS)), st.floats(0, 4))


def shown_by(kind: Any, use: Callable[[Any, CollectorRegistry], None]) -> bytes:
    """What Prometheus is shown of the metrics of a module after they were used."""
    prometheus_client.disable_created_metrics()
    registry = CollectorRegistry()
    use(kind, registry)
    shown: bytes = generate_latest(registry)
    return shown


@given(st.lists(st.tuples(st.sampled_from("ab"), NUMBERS)))
def test_they_show_what_the_librarys_show(observed: list[tuple[str, float]]) -> None:
    def use(kind: Any, registry: CollectorRegistry) -> None:
        counter = kind.Counter("tokens_total", "Tokens.", registry=registry)
        by_label = kind.Counter("calls", "Calls.", ["route", "status"], registry=registry)
        histogram = kind.Histogram("seconds", "Seconds.", buckets=BUCKETS, registry=registry)
        of_stage = kind.Histogram("s", "S.", ["stage"], buckets=BUCKETS, registry=registry)
        by_label.labels("never", "200")
        for label, number in observed:
            counter.inc(number)
            by_label.labels(label, "200").inc()
            histogram.observe(number)
            of_stage.labels(label).observe(number)

    assert shown_by(own_metrics, use) == shown_by(prometheus_client, use)


def test_a_bucket_points_to_its_last_exemplar() -> None:
    def use(kind: Any, registry: CollectorRegistry) -> None:
        histogram = kind.Histogram("s", "S.", ["stage"], buckets=BUCKETS, registry=registry)
        for number, trace_id in ((1, "a"), (0.5, "b"), (3, "c"), (0.1, None)):
            exemplar = None if trace_id is None else {"trace_id": trace_id}
            histogram.labels("0").observe(number, exemplar)

    def without_times(shown: bytes) -> list[bytes]:
        return [line.rpartition(b" ")[0] if b" # " in line else line for line in shown.split(b"\n")]

    shown = without_times(shown_by(own_metrics, use))
    assert shown == without_times(shown_by(prometheus_client, use))
    assert sum(b" # " in line for line in shown) == 2


def test_a_name_is_given_once() -> None:
    registry = CollectorRegistry()
    own_metrics.Counter("calls", "Calls.", registry=registry)
    with pytest.raises(ValueError, match="calls"):
        own_metrics.Counter("calls_total", "Calls.", registry=registry)


def test_labels_have_as_many_values_as_names() -> None:
    counter = own_metrics.Counter("calls", "Calls.", ["route"], registry=CollectorRegistry())
    with pytest.raises(ValueError, match="1 labels"):
        counter.labels("/", "200")
