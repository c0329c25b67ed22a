"""Logs, for people and for machines."""

import io
import json
import logging
import sys

import pytest

from services.common.telemetry import JsonFormatter, TextFormatter, configure_logging
from services.common.tracing import current_ids
from tests.recorded_spans import RecordedSpans, span_id, trace_id


def record(message: str, *, error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("services.x", logging.WARNING, "x.py", 1, message, (), info)


def test_json_has_what_the_line_has() -> None:
    entry = json.loads(JsonFormatter("frontend", None).format(record('a "line"\nof two')))
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "WARNING",
        "service": "frontend",
        "logger": "services.x",
        "message": 'a "line"\nof two',
    }


def test_json_carries_the_current_span() -> None:
    formatter = JsonFormatter("frontend", current_ids)
    spans = RecordedSpans()
    with spans.tracer.start_as_current_span("x"):
        entry = json.loads(formatter.format(record("inside")))
    [span] = spans.all()
    assert (entry["trace_id"], entry["span_id"]) == (trace_id(span), span_id(span))
    assert "trace_id" not in json.loads(formatter.format(record("outside")))


def test_lines_name_the_request_that_they_are_about() -> None:
    names = iter(["client-7", None] * 2)
    text = TextFormatter("frontend", lambda: next(names))
    assert text.format(record("inside")).endswith("services.x: inside [request client-7]")
    assert text.format(record("outside")).endswith("services.x: outside")
    machine = JsonFormatter("frontend", None, lambda: next(names))
    assert json.loads(machine.format(record("inside")))["request_id"] == "client-7"
    assert "request_id" not in json.loads(machine.format(record("outside")))


def test_json_carries_the_exception() -> None:
    entry = json.loads(JsonFormatter("x", None).format(record("bug", error=ValueError("why"))))
    assert entry["exception"] == "ValueError: why"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_both_formats_go_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    try:
        configure_logging("frontend", log_format="json" if log_format == "json" else "text")
        logging.getLogger("services.x").info("hello")
        line = written.getvalue()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    if log_format == "json":
        assert json.loads(line)["message"] == "hello"
    else:
        assert line.endswith("INFO frontend services.x: hello\n")
