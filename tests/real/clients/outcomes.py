"""Runs all cases of a program at the same time. Returns the result of each, or the error that it
raised as text."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Mapping
from typing import Any


async def outcomes(cases: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """Awaits all cases, and returns the outcome of each."""
    ended = await asyncio.gather(*cases.values(), return_exceptions=True)
    return {
        case: repr(outcome) if isinstance(outcome, BaseException) else outcome
        for case, outcome in zip(cases, ended, strict=True)
    }


def report(cases: Mapping[str, Awaitable[Any]]) -> None:
    """Prints the outcomes of cases as a line of JSON."""
    sys.stdout.write(json.dumps(asyncio.run(outcomes(cases))) + "\n")
