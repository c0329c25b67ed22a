"""An attack: what an attacker does, what he may get for it, and how it must be counted."""

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
"""Answers that an attacker got, by what he made of them: a status of HTTP or gRPC, or `closed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What one attacker does, from a process of its own."""

    name: str
    run: Callable[[Target], Awaitable[Answers]]
    answers: frozenset[str] = frozenset()
    """Answers that he may get; any that are no fault of the server when empty."""
    refusals: frozenset[Refusal] = frozenset()
    """Reasons of which at least one must be counted; none need be when empty."""
    may_crowd_out: bool = False
    """Whether honest clients may be refused while it lasts: without keys, who asks first gets a
    place."""
    limit_s: float = 60.0
    system: SystemName = "open"
