"""`python -m services.frontend --model DIR --scheduler HOST:PORT`: one frontend process."""

import sys

from services.common import process, tracing
from services.common.resident_memory import limit_arenas
from services.common.telemetry import configure_logging
from services.frontend.frontend import serve
from services.frontend.request.client_call import current_id
from services.frontend.settings import FrontendSettings

EXIT_LIMIT_S = 2.0
"""Seconds that the process waits, after its event loop has ended, for the threads that process
texts."""


def main() -> int:
    """Reads the settings and runs the frontend until the process gets a signal to stop. Returns the
    exit status."""
    limit_arenas()
    settings = FrontendSettings.load("frontend", sys.argv[1:])
    configure_logging(
        "frontend",
        settings.log_level,
        log_format=settings.log_format,
        trace_ids=tracing.current_ids,
        request_id=current_id,
    )
    if settings.ready_fd is not None:
        process.die_with_parent()
    process.wait_for_turn(settings.turn_fd, ready_fd=settings.ready_fd)
    with tracing.started("orcinus-frontend") as traces:
        return process.run(serve(settings, traces), ready_fd=settings.ready_fd)


if __name__ == "__main__":
    status = main()
    process.end_within(EXIT_LIMIT_S, status)
    sys.exit(status)
