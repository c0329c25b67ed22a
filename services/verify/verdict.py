"""The result of checking a receipt, for people and for programs."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Whether the tokens of a receipt come again."""

    SAME = "same"
    DIFFERS = "differs"
    UNCHECKED = "unchecked"


class Signature(StrEnum):
    """Whether the signature of a receipt is right."""

    VALID = "valid"
    WRONG = "wrong"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of checking one receipt: whether its tokens come again when they are computed, and
    whether its signature is right."""

    place: str
    """File and number of the receipt."""
    outcome: Outcome
    signature: Signature = Signature.UNCHECKED
    at: int | None = None
    """Index of the first token that differs, from 0; None unless a token differs."""
    logit_gap: float | None = None
    """How much larger the logit of the computed token is than that of the receipt's token, before
    the sampling options change logits; None if it is not known."""
    why: str = ""
    """Explanation for people; empty if there is nothing to add."""

    def __str__(self) -> str:
        said = {
            Outcome.SAME: "same",
            Outcome.DIFFERS: "differs" if self.at is None else f"differs at token {self.at}",
            Outcome.UNCHECKED: "cannot be checked",
        }[self.outcome]
        if self.logit_gap is not None:
            said += f" by {self.logit_gap:.4g} in logits"
        signed = {
            Signature.VALID: "signature valid",
            Signature.WRONG: "SIGNATURE WRONG",
            Signature.UNCHECKED: "signature not checked",
        }[self.signature]
        return f"{self.place}: {said}; {signed}" + (f" ({self.why})" if self.why else "")

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as an object for programs."""
        return {
            "receipt": self.place,
            "outcome": str(self.outcome),
            "signature": str(self.signature),
            "at": self.at,
            "logit_gap": self.logit_gap,
            "why": self.why,
        }
