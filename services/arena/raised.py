"""Errors that a policy or an order has raised, as messages name them."""

import traceback
from pathlib import Path


def described(error: BaseException) -> str:
    """Returns the kind and the text of an error, and the line of code that raised it:
    `KeyError: 7 (my_policy.py, line 30)`. The text of a syntax error has its own line."""
    kind = type(error).__name__
    text = f"{kind}: {error}" if str(error) else kind
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
