"""The command `orcinus`. It can also be run as `python -m services.cli`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.cli import bench, chat, check, programs, receipt_key, verify
from services.cli.model import NoModel
from services.common.ending import give_up
from services.common.process import end_within
from services.common.version import VERSION
from services.console import __main__ as console

INTERRUPTED = 130
LAST_BYTES_S = 2.0
"""Timeout in seconds for downloading threads to stop. After that the process ends anyway."""


def watch(arguments: Sequence[str]) -> int:
    """Runs the console, as `python -m services.console` does."""
    return console.main(arguments, program="orcinus watch")


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand of `orcinus`."""

    main: Callable[[Sequence[str]], int]
    """A function that takes the arguments after the subcommand and returns the exit status."""
    summary: str


COMMANDS: Mapping[str, Command] = {
    "serve": Command(programs.serve, "serve models on this machine, with OpenAI's API"),
    "chat": Command(chat.main, "chat with a model on the terminal"),
    "check": Command(check.main, "say what would run of a model, and what it takes"),
    "bench": Command(bench.main, "measure what a server makes of users"),
    "receipt-key": Command(receipt_key.main, "make a key that signs receipts of answers"),
    "verify": Command(verify.main, "check receipts, and compute their answers again"),
    "watch": Command(watch, "show what a pipeline does, live"),
    "tune": Command(programs.tune, "find the best settings for a model on this machine"),
    "arena": Command(programs.arena, "compare scheduling policies on the same requests"),
}


def usage() -> str:
    """Returns the help text of the command, with a line for each subcommand."""
    lines = [f"  {name:<11} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: orcinus COMMAND …",
            "",
            *lines,
            "",
            "orcinus COMMAND --help lists the options of each.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["--version"]:
        sys.stdout.write(f"orcinus {VERSION}\n")
        return 0
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if given else 2
    command = COMMANDS.get(given[0])
    if command is None:
        sys.stderr.write(f"{usage()}\n")
        give_up(f"there is no command {given[0]!r}", ready_fd=None)
        return 2
    try:
        return command.main(given[1:])
    except NoModel as error:
        end_within(LAST_BYTES_S, 1)
        return give_up(error, ready_fd=None)
    except KeyboardInterrupt:
        end_within(LAST_BYTES_S, INTERRUPTED)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
