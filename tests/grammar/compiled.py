"""Compiles grammars in tests, and waits for them."""

import hashlib
import threading
from collections.abc import Collection

from services.grammar.grammars import Grammars, Matcher

LIMIT_S = 60


def digest_of(grammar: str) -> bytes:
    """Returns the digest by which a grammar is named."""
    return hashlib.sha256(grammar.encode()).digest()


def compiled(grammars: Grammars, grammar: str, *, kept: Collection[bytes] | None = None) -> str:
    """Waits until a grammar is compiled; returns the reason why it could not be, or an empty text.
    All other grammars are kept unless `kept` is given."""
    reasons: list[str] = []
    is_done = threading.Event()

    def end(reason: str) -> None:
        reasons.append(reason)
        is_done.set()

    all_kept = set(grammars._kept) if kept is None else kept
    grammars.prepare(digest_of(grammar), grammar, kept=all_kept, on_end=end)
    assert is_done.wait(LIMIT_S)
    return reasons[0]


def matcher_of(grammars: Grammars, grammar: str) -> Matcher:
    """Returns a matcher at the beginning of an output that follows a grammar."""
    assert compiled(grammars, grammar) == ""
    matcher = grammars.matcher(digest_of(grammar))
    assert matcher is not None
    return matcher
