"""Limits the work of translating a schema, because other requests wait meanwhile."""

MAX_STEPS = 50_000
"""Largest number of steps in the translation of one schema; a step takes a few microseconds. A
schema of 20,000 characters takes about 2,000 steps."""


class WrongSchema(Exception):
    """Raised if a schema is wrong, or takes too much work. The message says where and why."""


class Work:
    """Counts down the steps that the translation of a schema may still take."""

    def __init__(self) -> None:
        self._n_left = MAX_STEPS

    def spend(self, n_steps: int = 1) -> None:
        """Subtracts `n_steps` from the steps that remain. Raises WrongSchema if fewer steps
        remain."""
        self._n_left -= n_steps
        if self._n_left < 0:
            raise WrongSchema("has too many parts")
