"""Accounts: the use that each client with an API key makes of this scheduler, over all frontends.

An account has two limits. `max_in_flight_tokens` limits the total number of tokens that the
sequences of the account's requests in the pool may reach; the pool counts these tokens.
`tokens_per_minute` is a token bucket that holds the tokens of one minute and fills evenly. Prompt
tokens are taken from the bucket when their request arrives, and an output token when it is
generated. No answer is stopped in the middle, so the bucket may be overdrawn; the next request then
waits until the bucket is no longer overdrawn. So in T minutes an account gets at most (T + 1)
`tokens_per_minute`, plus the tokens that its requests in the pool may reach.

Points in time are given by the caller, in seconds.
"""

from dataclasses import dataclass

from services.common.errors import InvalidRequest, PoolFull

MINUTE_S = 60.0

RETRY_AFTER_S = 1.0
"""Seconds after which a client is asked to try again, if it is not known when the client's requests
end: about the time of a few short answers."""

MAX_NAME_LENGTH = 64
"""Largest number of characters in the name of an account, as in the frontends' file of keys."""

MAX_ACCOUNTS = 65_536
"""Largest number of accounts that are in use, or were in use within the last minute. These accounts
take 20 MB of memory."""

N_KEPT = 1024
"""Number of accounts above which idle accounts are looked for and forgotten."""


class KeyRate(PoolFull):
    """Error: the account has used up its tokens per minute."""


class KeyInFlight(PoolFull):
    """Error: with another request, the account would exceed its `max_in_flight_tokens`."""


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """The weight of an account and its limits; a limit is None where the account is not limited."""

    tokens_per_minute: int | None = None
    max_in_flight_tokens: int | None = None
    weight: float = 1.0
    """The account's share of the pipelines, relative to other waiting accounts, in the fair
    order."""


class AccountUse:
    """The account of an API key: its limits, and the tokens that it uses at present."""

    def __init__(self, limits: AccountLimits, *, name: str = "") -> None:
        self.limits = limits
        self.name = name
        self.n_tokens = 0
        """Number of tokens that the account's requests in the pool may reach together. The pool
        updates the number."""
        self._full_at = 0.0  # when the bucket is full again if nothing more is taken from it

    def check(self, n_tokens: int, now: float) -> None:
        """Checks that a request of `n_tokens` tokens, prompt and output together, may enter the
        pool.

        Raises:
            InvalidRequest: the request exceeds the limit of tokens in flight even alone.
            KeyInFlight: the request exceeds the limit together with the account's other requests.
            KeyRate: the bucket is overdrawn. The error says for how long.
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
        """Returns the seconds until the bucket is no longer overdrawn. Returns 0 if the bucket is
        not overdrawn now, or if there is no limit per minute."""
        if self.limits.tokens_per_minute is None:
            return 0.0
        return max(0.0, self._full_at - now - MINUTE_S)

    def charge(self, n_tokens: int, now: float) -> None:
        """Takes `n_tokens` tokens from the bucket, which may become overdrawn."""
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            self._full_at = max(self._full_at, now) + n_tokens * MINUTE_S / per_minute

    def is_idle(self, now: float) -> bool:
        """Returns whether the account may be forgotten: none of its requests is in the pool and its
        bucket is full, so that a new account would be equal."""
        return self.n_tokens == 0 and self._full_at <= now


class Accounts:
    """Keeps all accounts in use, by name. Forgets idle accounts."""

    def __init__(self) -> None:
        self._accounts: dict[str, AccountUse] = {}
        self._sweep_at = N_KEPT

    def __len__(self) -> int:
        return len(self._accounts)

    def find(self, name: str, limits: AccountLimits, now: float) -> AccountUse:
        """Returns the account with the name `name`, creating it if needed. From now on `limits`
        apply to the account.

        Raises:
            InvalidRequest: the name is empty or too long.
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
        # The next sweep comes at twice the number of accounts, so its cost per account is constant.
        self._sweep_at = min(MAX_ACCOUNTS, max(N_KEPT, 2 * len(self._accounts)))
        if len(self._accounts) >= MAX_ACCOUNTS:
            raise PoolFull("too many API keys are in use", retry_after_s=RETRY_AFTER_S)
