"""A client as the fair order sees it: its weight, and how much it has been served.

Requests with one API key belong to one client. Requests without a key belong to one client, too:
nothing else that a caller shows is certain to be the caller's, and a share for each address or name
would favour callers that have many of them.
"""

from dataclasses import dataclass

PROMPT_CHARGE, OUTPUT_CHARGE = 1.0, 2.0
"""Service in a token of a prompt, and in one of an output, which takes an iteration of its own: the
paper's w_p and w_q."""


@dataclass(slots=True, eq=False)
class ServedClient:
    """A client and its virtual token counter (Sheng et al., "Fairness in Serving Large Language
    Models", OSDI'24)."""

    served: float = 0.0
    """Service that the client has had, divided by its weight; never falls."""
    turn: int = -1
    """Number of the client's last admission; of clients that were served alike, the one with the
    lowest number comes first."""
    weight: float = 1.0
    """The client's share relative to other clients."""
    n_requests: int = 0
    """Number of the client's requests in the pool."""
    n_waiting: int = 0
    """Number of these that have never run."""
    n_running: int = 0
    """Number of these that are admitted."""
    output_charge: float = OUTPUT_CHARGE
    """Added to `served` for each token of its outputs."""

    def set_weight(self, weight: float) -> None:
        """Sets the weight from now on; the service so far stays as it was counted."""
        self.weight = weight
        self.output_charge = OUTPUT_CHARGE / weight

    def may_have_more(self, other: "ServedClient", n_mine: int, n_others: int) -> bool:
        """Returns whether this client has been served no more than another one, and would have no
        more places by weight if it got one of the other's `n_others` places beside its own
        `n_mine`."""
        if self is other or self.served > other.served:
            return False
        return (n_mine + 1) * other.weight <= (n_others - 1) * self.weight

    def prompt_charge(self, n_tokens: int) -> float:
        """Returns what is added to `served` for a prompt of so many tokens."""
        return PROMPT_CHARGE * n_tokens / self.weight
