"""`python -m services.console`: shows what a pipeline does, live or from a recording.

A terminal shows the iterations of each stage, the requests and the K/V memory. If the output is not
a terminal, lines of text are written. The exit status is 0 after Ctrl-C, or at the end of a
recording that is written as lines. It is 1 when the frontend refuses the call or the recording
cannot be read.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services.common.ending import give_up
from services.common.http_api import HttpApi
from services.console.feed import Feed, LiveFeed, RecordingFeed
from services.console.screen import BrokenFeed, show, write

URL = "http://localhost:8000"
SILENCE_S = 60.0
"""Seconds without a byte from the frontend after which a connection counts as lost.

Comments in the event stream also prevent this timeout.
"""


def parser(program: str = "python -m services.console") -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=program, description="Shows iterations, requests and memory of a pipeline, live."
    )
    made.add_argument("--url", default=URL, help=f"a frontend's HTTP address ({URL})")
    made.add_argument("--model", metavar="NAME", help="which of the frontend's models to watch")
    made.add_argument("--key-env", metavar="NAME", help="variable that holds the API key")
    made.add_argument("--file", type=Path, help="replay a recording instead")
    made.add_argument("--speed", type=float, default=1.0, help="pace of a replay (1)")
    made.add_argument("--plain", action="store_true", help="write lines, on a terminal too")
    return made


def main(arguments: Sequence[str] | None = None, *, program: str | None = None) -> int:
    """Shows a pipeline. Returns the exit status."""
    made = parser() if program is None else parser(program)
    options = made.parse_args(arguments)
    is_plain = options.plain or not sys.stdout.isatty()
    try:
        feed = feed_of(options, is_plain=is_plain)
    except ValueError as error:
        return give_up(error, ready_fd=None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if is_plain:
            write(feed)
        else:
            show(feed, Console())
    except BrokenFeed as error:
        return give_up(error, ready_fd=None)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader of the lines has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        feed.close()
    return 0


def feed_of(options: argparse.Namespace, *, is_plain: bool) -> Feed:
    """Returns the source of events that the options choose: a recording, or a frontend.

    Raises:
        ValueError: an option is wrong.
    """
    if options.file is not None:
        if options.speed < 0:
            raise ValueError("--speed must not be negative")
        return RecordingFeed(options.file, speed=0.0 if is_plain else options.speed)
    key = None if options.key_env is None else os.environ.get(options.key_env)
    if options.key_env is not None and not key:
        raise ValueError(f"the variable {options.key_env} is not set")
    return LiveFeed(HttpApi(options.url, api_key=key, timeout_s=SILENCE_S), model=options.model)


if __name__ == "__main__":
    sys.exit(main())
