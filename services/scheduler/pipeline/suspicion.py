"""The time after which a late pipeline is suspected to be stuck.

If other pipelines serve, requests of a suspected pipeline go on there. In any case, a silent stage
of the suspected pipeline is taken for lost. A suspicion costs the computation of the requests that
go on elsewhere, or a new epoch. On a machine that is often late, for example because its processors
are shared, suspicions would follow each other. So each suspicion that was wrong doubles the time
until the next one, and the time halves with each minute without a wrong suspicion. A suspicion was
wrong if the iteration returned, or the stage answered, soon after it: then it would have been
cheaper to wait. Suspicions that were right need no such limit: each comes with a pause of the
pipeline that is longer than the time that the suspicion costs.
"""

import asyncio

SUSPICION_S = 0.5
"""Fixed number of seconds that is added to a multiple of the expected time; their sum is the time
after which an iteration is suspiciously late. The number grows after a wrong suspicion."""

MULTIPLE = 3.0
"""An iteration is not suspected before this multiple of its expected time, plus some fixed seconds.
The expected time is an upper estimate: about twice the longest recent time
(`services/common/iteration_limit.py`)."""

SILENCES = 3.0
"""While an iteration is late, a silent stage is taken for lost after this multiple of the present
number of fixed seconds, which is at first `SUSPICION_S`. At first this is the time of three
heartbeats."""

WRONG_WITHIN = 2.0
"""A suspicion was wrong if the iteration returned within this multiple of the time after which it
was suspected."""

MAX_SUSPICION_S = 60.0
"""Largest value to which the number of fixed seconds before a suspicion can grow."""

QUIET_S = 60.0
"""Seconds without a wrong suspicion after which the number of fixed seconds before a suspicion is
halved."""


class Suspicion:
    """Computes the time after which an iteration is suspicious, for all pipelines of a leader."""

    def __init__(self) -> None:
        self._fixed_s = SUSPICION_S
        self._noted_at = 0.0

    def limit_s(self, expected_s: float) -> float:
        """Returns the seconds after which an iteration that is expected to take `expected_s`
        seconds is suspicious."""
        return self._present_s + MULTIPLE * expected_s

    def note_wrong(self) -> None:
        """Doubles the fixed number of seconds before a suspicion (at first `SUSPICION_S`). Must be
        called when an iteration returned soon after it was suspected, or a stage answered soon
        after it was taken for lost."""
        self._fixed_s = min(2 * self._present_s, MAX_SUSPICION_S)
        self._noted_at = asyncio.get_running_loop().time()

    @property
    def silence_s(self) -> float:
        """Number of seconds of silence after which a stage is taken for lost, if an iteration is
        late."""
        return SILENCES * self._present_s

    @property
    def _present_s(self) -> float:
        quiet_s = asyncio.get_running_loop().time() - self._noted_at
        return max(SUSPICION_S, self._fixed_s * 0.5 ** int(quiet_s / QUIET_S))
