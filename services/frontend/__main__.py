"""`python -m services.frontend --model DIR --scheduler HOST:PORT`: one frontend process."""

import sys

from services.common import process
from services.common.telemetry import configure_logging
from services.frontend.frontend import serve
from services.frontend.settings import FrontendSettings


def main() -> int:
    """Reads the settings and serves until a signal; returns the exit status."""
    settings = FrontendSettings.load("frontend", sys.argv[1:])
    configure_logging("frontend", settings.log_level)
    if settings.ready_fd is not None:
        process.die_with_parent()
    return process.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
