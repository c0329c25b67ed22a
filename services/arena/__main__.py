"""`orcinus arena POLICY… --trace …`: runs policies on the same requests and compares them.

A policy is given by a name of the setting `policy` or `order`, by both as POLICY/ORDER, or by a
file FILE.py that defines a policy or an order. By default, policies run in virtual time: the real
scheduling core runs on a simulated machine whose costs are known. With --real, policies also run on
a model on this machine. With --sleeping, they also run in a real system whose ranks sleep for the
time that a given machine takes. The costs in virtual time are then the costs that were measured in
that system. A third line of the table, `replayed`, is a run in virtual time whose costs were fitted
to the iterations of the sleeping or real run. Every batch is checked, and a policy that breaks a
rule is stopped.

The exit status is 0 if all runs were complete, 1 if one was stopped because its policy broke a rule
or its system failed, and 2 if nothing could be run.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from services.arena import real, recorded, table, virtual
from services.arena.entrants import GALLERY, Entrant, parse
from services.arena.figures import Figures, Result
from services.arena.options import N_REAL_REQUESTS, N_REQUESTS, parser
from services.arena.referee import Stopped
from services.arena.setup import Setup
from services.arena.traffic import Choice, Traffic, traffic_of
from services.common.ending import give_up
from services.common.errors import OrcinusError
from services.common.telemetry import configure_logging
from services.tune.system import SystemFailed
from simulator.machines import MACHINES, MachineCosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the arena. Returns the exit status."""
    description = __doc__.split("\n\n", 1)[1] if __doc__ else ""
    options = parser(description).parse_args(arguments)
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
    """Returns the function that draws results. Raises ValueError if matplotlib is not installed;
    serving does not need it."""
    try:
        module = import_module("services.arena.drawing")
    except ModuleNotFoundError as error:
        text = f"figure: needs the package {error.name}: pip install orcinus[bench]"
        raise ValueError(text) from error
    found: Callable[[Path, Sequence[Result]], None] = module.draw
    return found


def _recorded(options: argparse.Namespace, entrants: Sequence[Entrant]) -> list[Result]:
    """Returns the results for a recording: what the recorded policy did in the real system, and
    what this policy and the entrants do in virtual time."""
    history = recorded.read(options.recording)
    if history.n_vectors:
        _say(f"left out: {history.n_vectors} requests for vectors")
    own = history.entrant
    name = history.traffic.name
    results = [Result(name, own.name, "recorded", history.figures)]
    for entrant in dict.fromkeys([own, *entrants]):
        results.append(_virtual(options, entrant, history.setup, history.traffic))
    return results


def _compared(
    options: argparse.Namespace, entrants: Sequence[Entrant], files: Sequence[Path]
) -> Iterator[list[Result]]:
    """Yields, for each trace, the results of all entrants."""
    model = options.real or options.sleeping
    place = None
    if model is not None:
        place = real.Place(
            model,
            None if options.sleeping is None else options.machine,
            options.stages,
            options.max_batch_size,
            options.max_batch_tokens,
            n_slots=options.slots,
            is_optimistic=options.optimistic,
            files=files,
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
                results += _real(options, entrant, place, setup, traffic, results[-1].figures)
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
    setup: Setup,
    traffic: Traffic,
    predicted: Figures,
) -> list[Result]:
    """Runs an entrant on a real system, and then in virtual time with costs that were fitted to the
    iterations of the real run. Returns the results of both, or only the first result if the real
    run failed. If the second run agrees with the real one, any difference between `predicted` and
    the real run comes from the speed of the machine."""
    n_output = sum(one.n_output for one in traffic.arrivals)
    expected_s = n_output / predicted.tokens_per_s
    try:
        found = real.run(entrant, place, traffic.arrivals, expected_s=expected_s, seed=options.seed)
    except (Stopped, SystemFailed) as stopped:
        return [Result(traffic.name, entrant.name, place.way, None, str(stopped))]
    costs = replace(found.costs, request_s=setup.costs.request_s)
    again = _virtual(options, entrant, replace(setup, costs=costs), traffic)
    return [
        Result(traffic.name, entrant.name, place.way, found.figures),
        replace(again, way="replayed"),
    ]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
