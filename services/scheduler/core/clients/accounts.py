"""Accounts: what each client with an API key uses of this scheduler, over all frontends.

An account has two limits. `max_in_flight_tokens` bounds the tokens that its requests in the pool
may come to; the pool counts them. `tokens_per_minute` is a bucket that holds one minute's tokens
and fills evenly. A prompt is taken from the bucket when its request comes in, an output token when
it is generated. No answer is stopped in the middle, so the bucket may be overdrawn; the next
request then waits until it no longer is. In any time T an account therefore gets at most
`tokens_per_minute` for each minute of T and one more, and what its requests in the pool come to.

Points in time are given by the caller, in seconds.
"""

from dataclasses import dataclass

from services.common.errors import InvalidRequest, PoolFull

MINUTE_S = 60.0

RETRY_AFTER_S = 1.0
"""Seconds after which to try again where it is not known when a request ends: about a few short
answers."""

MAX_NAME_LENGTH = 64
"""Characters in the name of an account, as the frontends' file of keys allows."""

MAX_ACCOUNTS = 65_536
"""Accounts at most that are in use, or were within the minute: 20 MB."""

N_KEPT = 1024
"""Accounts up to which none is looked for that can be forgotten."""


class KeyRate(PoolFull):
    """The account has used up its tokens of the minute."""


class KeyInFlight(PoolFull):
    """The account's requests come to as many tokens as they may together."""


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """The weight of an account and its limits; a limit is None where there is none."""

    tokens_per_minute: int | None = None
    max_in_flight_tokens: int | None = None
    weight: float = 1.0
    """The account's share of the pipeline beside other waiting accounts, where the order is fair.
    """


class AccountUse:
    """The account of an API key, and what it has in use."""

    def __init__(self, limits: AccountLimits, *, name: str = "") -> None:
        self.limits = limits
        self.name = name
        self.n_tokens = 0
        """Tokens that the account's requests in the pool may come to; the pool counts them."""
        self._full_at = 0.0  # when the bucket is full again if nothing more is taken from it

    def check(self, n_tokens: int, now: float) -> None:
        """Checks that a request of so many tokens, prompt and output, may come in.

        Raises:
            InvalidRequest: it is more than may ever be in flight.
            KeyInFlight: it is more than there is room for now.
            KeyRate: the bucket is empty; says when it is not.
        """
        limit = self.limits.max_in_flight_tokens
        if limit is not None and n_tokens > limit:
            raise InvalidRequest(
                "max_tokens",
                f"prompt and output of {n_tokens} tokens exceed the {limit} that this API key "
                "allows at once",
            )
        if limit is not None and self.n_tokens + n_tokens > limit:
            raise KeyInFlight(
                f"this API key allows {limit} tokens at once, prompts and outputs together",
                retry_after_s=RETRY_AFTER_S,
            )
        wait_s = self.overdrawn_s(now)
        if wait_s > 0:
            raise KeyRate(
                f"this API key allows {self.limits.tokens_per_minute} tokens a minute",
                retry_after_s=wait_s,
            )

    def overdrawn_s(self, now: float) -> float:
        """Returns the seconds until the bucket has tokens; 0 if it has."""
        if self.limits.tokens_per_minute is None:
            return 0.0
        return max(0.0, self._full_at - now - MINUTE_S)

    def charge(self, n_tokens: int, now: float) -> None:
        """Takes tokens from the bucket."""
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            self._full_at = max(self._full_at, now) + n_tokens * MINUTE_S / per_minute

    def is_idle(self, now: float) -> bool:
        """Returns whether the account has nothing in use, so that a new account would be equal."""
        return self.n_tokens == 0 and self._full_at <= now


class Accounts:
    """All accounts in use, by name; accounts that are not used any more are forgotten."""

    def __init__(self) -> None:
        self._accounts: dict[str, AccountUse] = {}
        self._sweep_at = N_KEPT

    def __len__(self) -> int:
        return len(self._accounts)

    def find(self, name: str, limits: AccountLimits, now: float) -> AccountUse:
        """Returns the account of that name, with these limits from now on.

        Raises:
            InvalidRequest: no account can have that name.
            PoolFull: there are too many accounts in use.
        """
        account = self._accounts.get(name)
        if account is None:
            if not 0 < len(name) <= MAX_NAME_LENGTH:
                raise InvalidRequest("account", f"has a name of {len(name)} characters")
            self._make_room(now)
            account = self._accounts[name] = AccountUse(limits, name=name)
        elif account.limits != limits:
            account.limits = limits
        return account

    def _make_room(self, now: float) -> None:
        if len(self._accounts) < self._sweep_at:
            return
        self._accounts = {
            name: account for name, account in self._accounts.items() if not account.is_idle(now)
        }
        # Twice as many before the next sweep: its cost for each account stays the same.
        self._sweep_at = min(MAX_ACCOUNTS, max(N_KEPT, 2 * len(self._accounts)))
        if len(self._accounts) >= MAX_ACCOUNTS:
            raise PoolFull("too many API keys are in use", retry_after_s=RETRY_AFTER_S)
