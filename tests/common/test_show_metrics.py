"""The program that prints samples of a process's metrics."""

import sys

import pytest
from prometheus_client import CollectorRegistry, Gauge

from services.common import metrics, show_metrics


def test_samples_that_are_not_0_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("state", "A state.", ["name"], registry=registry)
    gauge.labels("asleep").set(1)
    gauge.labels("serving").set(0)
    Gauge("other", "Another.", registry=registry).set(1)
    with metrics.listening("127.0.0.1:0", registry) as address:
        monkeypatch.setattr(sys, "argv", ["show_metrics", str(address), "state", "none"])
        assert show_metrics.main() == 0
    assert capsys.readouterr().out == 'state{name="asleep"} 1.0\n'
    assert show_metrics.main() == 1
    assert "does not answer" in capsys.readouterr().err
