"""`orcinus arena POLICY… --trace …`: runs policies on the same requests and compares them.

A policy is a name of the setting `policy` or `order`, both as POLICY/ORDER, or a file FILE.py that
defines one. By default policies run in virtual time, by the scheduling core that serves, on a
machine of known costs. With --real they also run on a model on this machine, and with --sleeping in
a real system whose ranks sleep for the time that the machine takes; virtual time then has the costs
that were measured there. Every batch is checked, and a policy that breaks a rule is stopped.

The exit status is 0 if all runs were complete, 1 if one was stopped because its policy broke a rule
or its system failed, and 2 if nothing could be run.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from services.arena import real, recorded, table, virtual
from services.arena.entrants import GALLERY, Entrant, parse
from services.arena.figures import Figures, Result
from services.arena.referee import Stopped
from services.arena.setup import Setup
from services.arena.traffic import NAMES, PAPER, Choice, Traffic, traffic_of
from services.common.ending import give_up
from services.common.errors import OrcinusError
from services.common.telemetry import configure_logging
from services.tune.system import SystemFailed
from simulator.machines import MACHINES, MachineCosts

DEFAULT_MACHINE = "four H100"
N_REQUESTS, N_REAL_REQUESTS = 1000, 100
MAX_TOKENS = 8192


def count(text: str) -> int:
    """Returns a positive number. Raises ArgumentTypeError if the text is none."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Returns a number above 0. Raises ArgumentTypeError if the text is none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def deviation(text: str) -> float:
    """Returns a number from 0 to 10. Raises ArgumentTypeError if the text is none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 10, not {text!r}")
    return value


def png(text: str) -> Path:
    """Returns the path of a PNG file. Raises ArgumentTypeError if the name has another ending."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end with .png, not {text!r}")
    return Path(text)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="orcinus arena",
        description=__doc__.split("\n\n", 1)[1] if __doc__ else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "policies", metavar="POLICY", nargs="*", help=f"default: all of {', '.join(GALLERY)}"
    )
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
    shown = made.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print a JSON object for each run")
    shown.add_argument("--figure", type=png, metavar="FILE", help="draw a PNG")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the arena. Returns the exit status."""
    options = parser().parse_args(arguments)
    configure_logging("arena", "ERROR")
    try:
        draw = None if options.figure is None else _drawing()
        entrants, files = parse(options.policies or list(GALLERY))
        results: list[Result] = []
        for of_trace in (
            [_recorded(options, entrants)]
            if options.recording is not None
            else _compared(options, entrants, files)
        ):
            _show(of_trace, as_json=options.json)
            results += of_trace
    except (OSError, OrcinusError, SystemFailed, ValueError) as error:
        give_up(error, ready_fd=None)
        return 2
    if draw is not None:
        draw(options.figure, results)
        _say(f"wrote {options.figure}")
    return 1 if any(one.figures is None for one in results) else 0


def _show(results: Sequence[Result], *, as_json: bool) -> None:
    shown = [json.dumps(one.to_json()) for one in results] if as_json else table.lines(results)
    sys.stdout.write("\n".join(shown) + "\n")
    sys.stdout.flush()


def _drawing() -> Callable[[Path, Sequence[Result]], None]:
    """Returns the function that draws. Raises ValueError if matplotlib is not installed, which
    serving does not need."""
    try:
        module = import_module("services.arena.drawing")
    except ModuleNotFoundError as error:
        text = f"figure: needs the package {error.name}: pip install orcinus[bench]"
        raise ValueError(text) from error
    found: Callable[[Path, Sequence[Result]], None] = module.draw
    return found


def _recorded(options: argparse.Namespace, entrants: Sequence[Entrant]) -> list[Result]:
    """Returns what the recorded policy did, and what it and the entrants do in virtual time."""
    history = recorded.read(options.recording)
    own = history.entrant
    name = history.traffic.name
    results = [Result(name, own.name, "recorded", history.figures)]
    for entrant in dict.fromkeys([own, *entrants]):
        results.append(_virtual(options, entrant, history.setup, history.traffic))
    return results


def _compared(
    options: argparse.Namespace, entrants: Sequence[Entrant], files: Sequence[Path]
) -> Iterator[list[Result]]:
    """Yields the results of each trace."""
    model = options.real or options.sleeping
    place = None
    if model is not None:
        place = real.Place(
            model,
            None if options.sleeping is None else options.machine,
            options.stages,
            options.max_batch_size,
            options.max_batch_tokens,
            files,
        )
        _say(f"measuring the costs of iterations for {options.calibration_s:g} s")
        setup = real.measured_setup(place, limit_s=options.calibration_s)
    else:
        setup = _setup(options)
    longest = setup.n_slots // setup.block_size * setup.block_size
    if place is not None:
        longest = min(longest, place.max_model_len)
    choice = Choice(
        n_requests=options.requests or (N_REQUESTS if place is None else N_REAL_REQUESTS),
        max_tokens=min(longest, options.max_tokens),
        n_clients=options.clients if place is None else 0,
        asks_exactly=place is not None,
        seed=options.seed,
    )
    for text in options.trace:
        results = []
        traffic = _at_rate(traffic_of(text, choice), setup, options)
        for entrant in entrants:
            _say(f"{traffic.name}: {entrant.name}")
            results.append(_virtual(options, entrant, setup, traffic))
            if place is not None and results[-1].figures is not None:
                results.append(_real(options, entrant, place, traffic, results[-1].figures))
        yield results


def _setup(options: argparse.Namespace) -> Setup:
    machine = MACHINES[options.machine]
    return Setup(
        MachineCosts(machine, options.stages),
        options.slots or machine.n_slots,
        max_batch_size=options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        is_optimistic=options.optimistic,
    )


def _at_rate(traffic: Traffic, setup: Setup, options: argparse.Namespace) -> Traffic:
    if options.own_times or len(traffic.arrivals) < 2:
        return traffic
    rate = options.rate or options.load * virtual.capacity(setup, traffic.arrivals)
    return Traffic(traffic.name, tuple(virtual.scaled(traffic.arrivals, rate=rate)))


def _virtual(
    options: argparse.Namespace, entrant: Entrant, setup: Setup, traffic: Traffic
) -> Result:
    predictor = None
    if options.prediction_error is not None:
        lengths = {str(index): one.n_output for index, one in enumerate(traffic.arrivals)}
        predictor = virtual.NoisyPredictor(
            lengths, error=options.prediction_error, seed=options.seed
        )
    try:
        figures = virtual.run(entrant, setup, traffic.arrivals, predictor=predictor)
    except Stopped as stopped:
        return Result(traffic.name, entrant.name, "virtual", None, str(stopped))
    return Result(traffic.name, entrant.name, "virtual", figures)


def _real(
    options: argparse.Namespace,
    entrant: Entrant,
    place: real.Place,
    traffic: Traffic,
    predicted: Figures,
) -> Result:
    n_output = sum(one.n_output for one in traffic.arrivals)
    expected_s = n_output / predicted.tokens_per_s
    try:
        figures = real.run(
            entrant, place, traffic.arrivals, expected_s=expected_s, seed=options.seed
        )
    except (Stopped, SystemFailed) as stopped:
        return Result(traffic.name, entrant.name, place.way, None, str(stopped))
    return Result(traffic.name, entrant.name, place.way, figures)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
