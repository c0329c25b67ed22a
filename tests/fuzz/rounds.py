"""Runs of hypothesis that are as long as `FUZZ_N` says, and begin anew every few hundred inputs.

A property is a function of one example. The property reports by `Inputs.add` how many inputs the
example had. Each message of a stream counts as one input.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from random import SystemRandom
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis.strategies import SearchStrategy

N_INPUTS = int(os.environ.get("FUZZ_N") or 2000)
"""Inputs of all parts together."""

SEED = int(os.environ.get("FUZZ_SEED") or SystemRandom().randrange(10**6))
"""Seed of a run. It determines the inputs, except inputs that depend on the order of the server's
answers."""

FIRST_ROUND, ROUND = 50, 500
"""Numbers of examples in the first and in each further run of hypothesis. hypothesis remembers all
examples of a run."""

Example = TypeVar("Example")


class Inputs:
    """Number of inputs that one part has sent, and how many it is to send."""

    def __init__(self, name: str, *, share: float) -> None:
        self.n_wanted = max(1, round(N_INPUTS * share))
        self.n_sent = 0
        self._name = name
        self._outcomes: Counter[str] = Counter()
        self._started_at = time.monotonic()

    def add(self, n_inputs: int, outcome: str) -> None:
        """Counts inputs of an example that was sent, by their outcome."""
        self.n_sent += n_inputs
        self._outcomes[outcome] += 1

    @property
    def n_examples_wanted(self) -> int:
        """The number of examples that the inputs which are left make, as far as one can tell."""
        n_left, n_examples = self.n_wanted - self.n_sent, self._outcomes.total()
        if not n_examples:
            return min(FIRST_ROUND, n_left)
        return min(ROUND, math.ceil(n_left * n_examples / self.n_sent))

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self._started_at
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in self._outcomes.most_common())
        return (
            f"{self._name}: {self.n_sent} inputs in {elapsed_s:.0f} s, FUZZ_SEED={SEED}: {outcomes}"
        )


def run(
    check: Callable[[Example], None], examples: SearchStrategy[Example], inputs: Inputs
) -> None:
    """Checks a property with new examples until there have been enough inputs, and prints the
    number of inputs."""
    number = 0
    while inputs.n_examples_wanted > 0:
        number += 1

        @seed(SEED + number)
        @settings(
            max_examples=inputs.n_examples_wanted,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(examples)
        def check_each(example: Example) -> None:
            note(repr(example))
            check(example)

        check_each()
    print(f"\n{inputs}")
