"""The result of checking a receipt, which can be written as text or as JSON."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Whether the answer that was computed again has the tokens of a receipt and ends in the same
    way."""

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
    """The result of checking one receipt: whether its tokens are the same when they are computed
    again, and whether its signature is right."""

    place: str
    """Name of the file, a colon, and the number of the receipt in the file."""
    outcome: Outcome
    signature: Signature = Signature.UNCHECKED
    at: int | None = None
    """Index of the first token that differs, from 0. If only the reason for the end of the answer
    differs, the number of tokens. None unless the outcome is `DIFFERS`."""
    logit_gap: float | None = None
    """Logit of the computed token minus the logit of the receipt's token at the index `at`, before
    the sampling options change the logits. None if it is not known."""
    why: str = ""
    """Explanation of the result as text. Empty if there is nothing to explain."""

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
        """Returns the verdict as a JSON object."""
        return {
            "receipt": self.place,
            "outcome": str(self.outcome),
            "signature": str(self.signature),
            "at": self.at,
            "logit_gap": self.logit_gap,
            "why": self.why,
        }
