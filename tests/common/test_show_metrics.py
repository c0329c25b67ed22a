"""The program that prints samples of a process's metrics."""

import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from services.common import metrics, show_metrics
from tests.fake_http import serving_http
from tests.limits import HANG_S


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


class Broken(BaseHTTPRequestHandler):
    """Sends the beginning of an answer, and then holds or closes the connection."""

    beginning: bytes
    holds: bool
    gate: threading.Event

    def do_GET(self) -> None:
        self.wfile.write(self.beginning)
        self.wfile.flush()
        if self.holds:
            self.gate.wait(HANG_S)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("holds", [True, False], ids=["held", "closed"])
@pytest.mark.parametrize(
    "beginning",
    [b"", b"SSH-2.0", HEAD, HEAD + b"state 1.0\n"],
    ids=["nothing", "no HTTP", "head", "sample"],
)
def test_an_answer_that_is_not_complete_is_an_error_with_a_reason(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    beginning: bytes,
    holds: bool,
) -> None:
    monkeypatch.setattr(show_metrics, "LIMIT_S", 0.05)
    released = threading.Event()
    attributes: dict[str, Any] = {"beginning": beginning, "holds": holds, "gate": released}
    with serving_http(Broken, released=released, **attributes) as url:
        monkeypatch.setattr(sys, "argv", ["show_metrics", url.removeprefix("http://"), "state"])
        assert show_metrics.main() == 1
    out, reason = capsys.readouterr()
    assert out == ""
    assert "does not answer: " in reason.removesuffix("answer: \n")
