"""`python -m services.scheduler.replay FILE`: runs a recorded schedule again.

The scheduling core gets the recorded inputs again and must select the recorded batches. The exit
status is 0 if all batches are equal, 1 after the first difference, which is printed, and 2 if the
file is not a recording that can be replayed. So a recording of a bug is a test of the bug.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from orcinus.v1 import watch_pb2

from services.common.watch_json import HEADER
from services.scheduler.watching.replaying import Difference, NotReplayable, Replay

SAME, DIFFERENT, UNUSABLE = 0, 1, 2


class NotARecording(Exception):
    """Raised if the file is not a recording. The message says why."""


def objects_of(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the JSON objects of a recording after its header, each with the number of its line.
    Leaves out a last line without a line end, because the scheduler was killed while it wrote this
    line.

    Raises:
        NotARecording: a line is not an event, or the first line is not a header.
    """
    for number, line in enumerate(lines, 1):
        if number > 1 and not line.endswith(b"\n"):
            return
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NotARecording(f"line {number} is not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise NotARecording(f"line {number} is no event")
        if number > 1:
            yield number, value
        elif value["type"] != HEADER["type"]:
            raise NotARecording("its first line is not that of a recording")
        elif value.get("version") != HEADER["version"]:
            raise NotARecording(
                f"it is of version {value.get('version')}, and this program reads "
                f"{HEADER['version']}"
            )


def replay(lines: Iterable[bytes]) -> Replay:
    """Replays a recording to its end, and returns the replay.

    Raises:
        NotARecording: the file is no recording.
        NotReplayable: the recording lacks decisions.
        Difference: the core has decided otherwise than in the recording. The error names the line.
    """
    result, number, n_decisions = Replay(), 1, 0
    try:
        for number, value in objects_of(lines):
            if value["type"] == "decision":
                n_decisions += 1
                result.take(decision_of(value, number))
    except Difference as difference:
        raise Difference(f"line {number}: {difference}") from difference
    except NotReplayable as lack:
        raise NotReplayable(f"line {number}: {lack}") from lack
    if not n_decisions:
        raise NotReplayable("it has no decisions: only what a scheduler records itself has them")
    return result


def decision_of(value: dict[str, Any], number: int) -> watch_pb2.DecisionEvent:
    """Returns the decision that an event holds. `value` is the JSON object of the event, from line
    `number`.

    Raises:
        NotARecording: the event is not a decision.
    """
    fields = {name: each for name, each in value.items() if name not in ("t", "type")}
    try:
        return ParseDict(fields, watch_pb2.DecisionEvent())
    except (ParseError, TypeError) as error:
        raise NotARecording(f"line {number} is no decision: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays the recording that the arguments name. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.scheduler.replay", description=__doc__
    )
    parser.add_argument("file", type=Path, help="a recording, made with the setting `record`")
    path: Path = parser.parse_args(arguments).file
    try:
        with path.open("rb") as file:
            result = replay(file)
    except (OSError, NotARecording, NotReplayable) as error:
        sys.stderr.write(f"{path} cannot be replayed: {error}\n")
        return UNUSABLE
    except Difference as difference:
        sys.stderr.write(f"{path}: {difference}\n")
        return DIFFERENT
    sys.stdout.write(f"{path}: {result.n_batches} batches, all the same\n")
    return SAME


if __name__ == "__main__":
    sys.exit(main())
