"""Describes errors that a policy or an order has raised, for messages to its author."""

import traceback
from pathlib import Path


def described(error: BaseException) -> str:
    """Returns the kind and the text of an error, and the line of code that raised it: `KeyError: 7
    (my_policy.py, line 30)`. For a syntax error no line is added, because its text has the line
    already."""
    kind = type(error).__name__
    text = f"{kind}: {error}" if str(error) else kind
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
