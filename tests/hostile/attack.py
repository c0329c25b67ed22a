"""An attack: its requests, the answers that the attacker may get, and the metric that must count
it."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from services.frontend.request.refusals import Refusal
from tests.hostile.target import Target

SystemName = Literal["open", "keys", "few descriptors"]
"""Which system is attacked: one that asks for no key, one that does, or one whose processes may
have 1,024 descriptors."""

Answers = Counter[str]
"""Number of answers that the attacker got, by kind: a status of HTTP or gRPC, or `closed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """The attack of one attacker, which runs in a process of its own."""

    name: str
    run: Callable[[Target], Awaitable[Answers]]
    answers: frozenset[str] = frozenset()
    """Kinds of answers that the attacker may get. If empty, all answers except errors of the server
    are allowed."""
    refusals: frozenset[Refusal] = frozenset()
    """Reasons for refusals, at least one of which must be counted. If empty, no refusal is
    expected."""
    may_crowd_out: bool = False
    """Whether honest clients may be refused during the attack. Without API keys, the first clients
    get all places."""
    limit_s: float = 60.0
    system: SystemName = "open"
