"""Prints or reports one line when a service cannot start or cannot go on.

    error: num_attention_heads: 9 cannot be divided among tp_size 2 ranks

A service without a launcher prints the line. A service that a launcher has started writes the line
to the launcher's pipe, and the launcher prints it once, when all services have ended.
"""

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from services.common.process import ReadyPipe
from services.common.telemetry import LogFormat

log = logging.getLogger(__name__)

ERROR = "error: "
READY_FD = "--ready-fd="


def give_up(reason: object, *, ready_fd: int | None, log_format: LogFormat = "text") -> int:
    """Reports in one line why the service ends: to the launcher through `ready_fd`, or else in the
    log or on standard error. Returns the service's exit status, which is 1."""
    text = str(reason)
    if isinstance(reason, OSError) and reason.filename is not None:
        text = f"{reason.filename}: {reason.strerror}"
    line = " ".join(text.split())
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, or the number is no pipe's
            ReadyPipe(ready_fd).report({"error": line})
    elif log_format == "json":
        log.error("%s", line)
    else:
        print_error(line)
    return 1


def refuse(reason: str, *, ready_fd: int | None) -> NoReturn:
    """Ends this process, a service whose settings are wrong, by raising SystemExit. `reason` says
    what is wrong with each setting."""
    raise SystemExit(f"{ERROR}{reason}" if ready_fd is None else give_up(reason, ready_fd=ready_fd))


def print_error(line: str) -> None:
    """Prints `line`, the reason why a service ends, on standard error."""
    sys.stderr.write(f"{ERROR}{line}\n")
    sys.stderr.flush()


def ready_fd_of(arguments: Sequence[str]) -> int | None:
    """Returns the file descriptor of the launcher's pipe from a command line whose other options
    may be wrong. Returns None if the command line has no such option, or if its value is not a
    number.

    The option is recognised only in the spelling that launchers use, `--ready-fd=NUMBER`.
    """
    given = [argument.removeprefix(READY_FD) for argument in arguments if READY_FD in argument]
    return int(given[-1]) if given and given[-1].isdecimal() else None
