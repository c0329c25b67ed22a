"""Logs: one line per event on standard error, with the name of the service in front; or one JSON
object per event, for machines, which carries the trace and span it belongs to."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

TraceIds = Callable[[], tuple[str, str] | None]
"""A function that returns the current trace and span ids, or None."""


class JsonFormatter(logging.Formatter):
    """Writes records as JSON, each on a line."""

    def __init__(self, service: str, trace_ids: TraceIds | None) -> None:
        super().__init__()
        self._service = service
        self._trace_ids = trace_ids

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line."""
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
        return json.dumps(entry)


def configure_logging(
    service: str,
    level: str = "INFO",
    *,
    log_format: LogFormat = "text",
    trace_ids: TraceIds | None = None,
) -> None:
    """Sets up the root logger of a service process."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service, trace_ids))
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
        )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("grpc", "asyncio", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
