"""A client in the eyes of the scheduler: who is served, by what weight, and how much so far.

Requests of one API key are one client's. Requests without a key are one client's, too: nothing else
that a caller shows is his for certain, and a share for each address or name would go to whoever has
most of them.
"""

from dataclasses import dataclass

PROMPT_CHARGE, OUTPUT_CHARGE = 1.0, 2.0
"""Service in a token of a prompt, and in one of an output, which takes an iteration of its own: the
paper's w_p and w_q."""


@dataclass(slots=True, eq=False)
class Client:
    """A client and its virtual token counter (Sheng et al., "Fairness in Serving Large Language
    Models", OSDI'24)."""

    served: float = 0.0
    """Service that it has had, divided by its weight; never falls."""
    turn: int = -1
    """Number of its last admission; who was admitted longer ago comes first among equals."""
    weight: float = 1.0
    """Its share beside the others'."""
    n_requests: int = 0
    """Requests of it in the pool."""
    n_waiting: int = 0
    """Requests of these that have never run: while there are any, it is backlogged."""
    n_running: int = 0
    """Requests of these that are admitted."""
    output_charge: float = OUTPUT_CHARGE
    """Added to `served` for each token of its outputs."""

    def set_weight(self, weight: float) -> None:
        """Sets the weight from now on; what it has had stays as it was counted."""
        self.weight = weight
        self.output_charge = OUTPUT_CHARGE / weight

    def may_have_more(self, other: "Client", n_mine: int, n_others: int) -> bool:
        """Returns whether this client would still have no more than its share beside another one's,
        by weight, if one of the other's `n_others` places became its own, of which it has
        `n_mine`; and whether it has been served no more."""
        if self is other or self.served > other.served:
            return False
        return (n_mine + 1) * other.weight <= (n_others - 1) * self.weight

    def prompt_charge(self, n_tokens: int) -> float:
        """Returns what is added to `served` for a prompt of so many tokens."""
        return PROMPT_CHARGE * n_tokens / self.weight
