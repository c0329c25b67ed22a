"""Creates named tuples in half the usual time.

Calling the class of a named tuple runs a function written in Python. Each output token needs a few
small tuples, and creating them by calling the class takes as long as all other work on the tuples.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Tuple = TypeVar("Tuple", bound=tuple[Any, ...])


def maker(kind: type[Tuple]) -> Callable[[tuple[Any, ...]], Tuple]:
    """Returns a function that creates a named tuple of the class `kind`. The argument of the
    function is a tuple with all fields in order."""
    return partial(tuple.__new__, kind)
