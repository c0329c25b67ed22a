"""Logs on standard error, in one of two formats. As text, each event begins with a line that has
the time, the level, and the names of the service and the logger. As JSON, each event is an object
on one line, with the ids of its trace and span."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

RequestId = Callable[[], str | None]
"""A function that returns the id of the request that the current task answers, or None."""

TraceIds = Callable[[], tuple[str, str] | None]
"""A function that returns the current trace and span ids, or None."""


class TextFormatter(logging.Formatter):
    """Formats log records as lines of text."""

    def __init__(self, service: str, request_id: RequestId | None = None) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
        self._request_id = request_id

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the first line of a log record, with the id of the request that the record is
        about, if any."""
        line = super().formatMessage(record)
        name = None if self._request_id is None else self._request_id()
        return line if name is None else f"{line} [request {name}]"


class JsonFormatter(logging.Formatter):
    """Formats each log record as JSON on one line."""

    def __init__(
        self, service: str, trace_ids: TraceIds | None, request_id: RequestId | None = None
    ) -> None:
        super().__init__()
        self._service = service
        self._trace_ids = trace_ids
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line of JSON."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if self._trace_ids is not None and (ids := self._trace_ids()) is not None:
            entry["trace_id"], entry["span_id"] = ids
        if self._request_id is not None and (name := self._request_id()) is not None:
            entry["request_id"] = name
        return json.dumps(entry)


def configure_logging(
    service: str,
    level: str = "INFO",
    *,
    log_format: LogFormat = "text",
    trace_ids: TraceIds | None = None,
    request_id: RequestId | None = None,
) -> None:
    """Sets up the root logger of a service process. `service` is the name of the service, and
    `level` is the lowest level that is logged."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service, trace_ids, request_id))
    else:
        handler.setFormatter(TextFormatter(service, request_id))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("grpc", "asyncio", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
