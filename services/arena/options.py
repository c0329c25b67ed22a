"""The command-line options of `orcinus arena`."""

import argparse
from pathlib import Path

from services.arena.entrants import GALLERY
from services.arena.traffic import NAMES, PAPER
from simulator.machines import MACHINES

DEFAULT_MACHINE = "four H100"
N_REQUESTS, N_REAL_REQUESTS = 1000, 100
MAX_TOKENS = 8192


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line. `description` is the text above the options."""
    made = argparse.ArgumentParser(
        prog="orcinus arena",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "policies", metavar="POLICY", nargs="*", help=f"default: all of {', '.join(GALLERY)}"
    )
    _add_requests(made)
    _add_machine(made)
    shown = made.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print a JSON object for each run")
    shown.add_argument("--figure", type=png, metavar="FILE", help="draw a PNG")
    return made


def _add_requests(made: argparse.ArgumentParser) -> None:
    traffic = made.add_argument_group("requests")
    traffic.add_argument(
        "--trace",
        nargs="+",
        metavar="NAME|FILE",
        default=[PAPER],
        help=f"{PAPER}, {', '.join(NAMES)}, or a file of Azure, BurstGPT or Mooncake ({PAPER})",
    )
    traffic.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="take requests, machine and settings from a scheduler's recording",
    )
    traffic.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help=f"of each trace ({N_REQUESTS}; {N_REAL_REQUESTS} with --real or --sleeping)",
    )
    traffic.add_argument(
        "--load",
        type=positive,
        default=0.9,
        metavar="X",
        help="rate of arrivals, as a part of what `chunked` serves if all arrive at once (0.9)",
    )
    traffic.add_argument(
        "--max-tokens",
        type=count,
        default=MAX_TOKENS,
        metavar="N",
        help=f"leave out requests with more tokens of prompt and output ({MAX_TOKENS})",
    )
    traffic.add_argument("--rate", type=positive, help="rate of arrivals, requests per second")
    traffic.add_argument("--own-times", action="store_true", help="keep the times of a file")
    traffic.add_argument("--clients", type=count, default=4, metavar="N", help="senders (4)")
    traffic.add_argument(
        "--prediction-error",
        type=deviation,
        metavar="S",
        help="predict lengths with this deviation of their logarithm; 0 is exact. By default "
        "lengths are learned from requests that have ended",
    )
    traffic.add_argument("--seed", type=int, default=0)


def _add_machine(made: argparse.ArgumentParser) -> None:
    where = made.add_argument_group("machine")
    where.add_argument(
        "--machine", choices=MACHINES, default=DEFAULT_MACHINE, help=f"({DEFAULT_MACHINE})"
    )
    ways = where.add_mutually_exclusive_group()
    ways.add_argument(
        "--real", type=Path, metavar="MODEL", help="also run the model of this directory here"
    )
    ways.add_argument(
        "--sleeping",
        type=Path,
        metavar="MODEL",
        help="also run ranks that sleep as the machine computes; MODEL gives the tokenizer",
    )
    where.add_argument(
        "--calibration-s", type=positive, default=30.0, help="seconds to measure costs (30)"
    )
    where.add_argument("--stages", type=count, default=1, metavar="N")
    where.add_argument("--slots", type=count, metavar="N", help="K/V slots, instead of all")
    where.add_argument("--max-batch-size", type=count, default=32, metavar="N", help="(32)")
    where.add_argument("--max-batch-tokens", type=count, default=512, metavar="N", help="(512)")
    where.add_argument(
        "--optimistic", action="store_true", help="reserve less memory; some are preempted"
    )


def count(text: str) -> int:
    """Returns the whole number in a text. Raises ArgumentTypeError if the text is not a whole
    number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Returns the number in a text. Raises ArgumentTypeError if the text is not a number above
    0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def deviation(text: str) -> float:
    """Returns the number in a text. Raises ArgumentTypeError if the text is not a number from 0 to
    10."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 10, not {text!r}")
    return value


def png(text: str) -> Path:
    """Returns a text as the path of a PNG file. Raises ArgumentTypeError if the name does not end
    with `.png`."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end with .png, not {text!r}")
    return Path(text)
