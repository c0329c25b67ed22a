"""`python -m services.hub SOURCE --to DIR`: fetches a checkpoint for several machines.

The command is for init containers, and for operators who fill a volume. The exit status is 0 if the
checkpoint is in the directory at the end, even if it was there before. If the checkpoint cannot be
fetched, the exit status is 1 and a line on standard error has the reason.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.ending import give_up
from services.common.process import end_within, take_sigterm
from services.hub.claim import cache_of, link, there, wait_until_there
from services.hub.kinds import FORMS, source_in
from services.hub.source import Source, SourceError

INTERRUPTED = 130
LAST_BYTES_S = 2.0
"""Timeout in seconds for downloading threads to stop. After that the process ends anyway."""


def say(line: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def source(text: str) -> Source:
    """Returns the source that a text names.

    Raises:
        argparse.ArgumentTypeError: the text is not the name of a source.
    """
    try:
        found = source_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like {FORMS}")
    return found


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m services.hub", description="Fetches a checkpoint."
    )
    made.add_argument("source", type=source, help=FORMS)
    made.add_argument("--to", type=Path, required=True, help="directory; it becomes a link")
    made.add_argument(
        "--wait", action="store_true", help="fetch nothing, and wait until others have"
    )
    made.add_argument("--wait-s", type=float, default=3600.0, help="seconds to wait at most (3600)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches a checkpoint, or waits until another process has fetched it. Returns the exit
    status."""
    options = parser().parse_args(arguments)
    wanted, directory = options.source, options.to.absolute()
    # As process 1 of a container, it would ignore the signal without a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        take_sigterm()
        if options.wait:
            found = wait_until_there(wanted, directory, limit_s=options.wait_s)
            if found is None:
                return give_up(f"{wanted}: nobody has fetched it to {directory}", ready_fd=None)
        else:
            found = there(wanted, directory)
            if found is None:
                found = wanted.fetch(say=say, cache=cache_of(directory))
                link(directory, found.path)
    except (SourceError, OSError) as error:
        end_within(LAST_BYTES_S, 1)
        return give_up(error, ready_fd=None)
    except KeyboardInterrupt:
        end_within(LAST_BYTES_S, INTERRUPTED)
        return INTERRUPTED
    sys.stdout.write(f"{wanted} is {found.state} in {directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
