"""The work of translating a schema, which is limited: it is done while other requests wait."""

MAX_STEPS = 50_000
"""Largest number of steps for one schema; a step takes a few microseconds. A schema of 20,000
characters takes about 2,000."""


class WrongSchema(Exception):
    """The schema is wrong, or takes too much work; the message says where and why."""


class Work:
    """The steps that are left for a schema."""

    def __init__(self) -> None:
        self._n_left = MAX_STEPS

    def spend(self, n_steps: int = 1) -> None:
        """Takes steps. Raises WrongSchema if too few are left."""
        self._n_left -= n_steps
        if self._n_left < 0:
            raise WrongSchema("has too many parts")
