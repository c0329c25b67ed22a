"""A client in the fair order: its weight, and the service that the client has received.

All requests with one API key belong to one client. All requests without a key together belong to
one further client: no other property of a request proves who sent it, and a share for each address
or name would favour callers that have many addresses or names.
"""

from dataclasses import dataclass

PROMPT_CHARGE, OUTPUT_CHARGE = 1.0, 2.0
"""Service that is charged for a prompt token, and for an output token, which takes an iteration of
its own. These are w_p and w_q of the paper (see `ServedClient`)."""


@dataclass(slots=True, eq=False)
class ServedClient:
    """A client and its virtual token counter (Sheng et al., "Fairness in Serving Large Language
    Models", OSDI'24)."""

    served: float = 0.0
    """Service that the client has received, divided by the client's weight; never falls."""
    turn: int = -1
    """Sequence number of the client's last admission among the admissions of all clients; -1 before
    the first one. Among clients with equal service, the client with the lowest number comes
    first."""
    weight: float = 1.0
    """The client's share relative to other clients."""
    n_requests: int = 0
    """Number of the client's requests in the pool."""
    n_waiting: int = 0
    """Number of the client's requests in the pool that have never run."""
    n_running: int = 0
    """Number of the client's requests in the pool that are admitted."""
    output_charge: float = OUTPUT_CHARGE
    """Amount that is added to `served` for each output token of the client's requests."""

    def set_weight(self, weight: float) -> None:
        """Sets the weight that is used from now on. Service counted before is not changed."""
        self.weight = weight
        self.output_charge = OUTPUT_CHARGE / weight

    def may_have_more(self, other: "ServedClient", n_mine: int, n_others: int) -> bool:
        """Returns whether this client may take the place of a running request from another client.

        This client has `n_mine` running requests, and the other client has `n_others`. Two
        conditions must hold. This client has been served no more than the other client. After one
        place has moved from the other client to this one, this client does not have more requests
        than the other client, relative to their weights.
        """
        if self is other or self.served > other.served:
            return False
        return (n_mine + 1) * other.weight <= (n_others - 1) * self.weight

    def prompt_charge(self, n_tokens: int) -> float:
        """Returns the amount that is added to `served` for a prompt of `n_tokens` tokens."""
        return PROMPT_CHARGE * n_tokens / self.weight
