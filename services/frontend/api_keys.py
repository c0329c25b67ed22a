"""API keys: who may use the public API, and how much of it. Both protocols ask here.

A file, mounted from a Secret, has a name, a hash and limits for each key:

    {"keys": [{"name": "alice", "sha256": "9f86d0…", "requests_per_minute": 60}]}

Keys are random and long, so that a plain SHA-256 hides them; they are looked up by that, and no
comparison tells how near a guess came. A changed file is in use a second later. Limits go by
name: whoever gets another key keeps what he has used up. Those of calls and answers are each
frontend's own; several frontends do not add up what they see. Those of tokens are the scheduler's,
over all frontends.

`python -m services.frontend.api_keys NAME` makes a key and its entry in the file.
"""

import argparse
import hashlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

from orcinus.v1 import scheduler_pb2
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from services.common import errors
from services.common.mounted import Mounted
from services.common.priority import DEFAULT_PRIORITY, PRIORITIES
from services.frontend.link.scheduler_events import DEFAULT_RETRY_AFTER_S
from services.frontend.request.answers_in_flight import AnswersInFlight
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.refusals import Refusal, Refusals

KEY_PREFIX = "orc-"
"""The beginning of every key, so that a scanner of repositories recognises one."""

KEY_BYTES = 32

REREAD_S = 1.0
"""Seconds for which the file is not looked at again."""

MINUTE_S = 60.0

PositiveTokens = Annotated[int, Field(gt=0, lt=2**63)]
"""A limit in tokens; what it is above is none."""

Weight = Annotated[float, Field(ge=0.001, le=1000)]
"""A share beside others."""


class ApiKey(BaseModel):
    """One key's entry in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
    requests_per_minute: PositiveInt | None = None
    """Calls of any method, on average; after a quiet minute they may all come at once."""
    max_in_flight: PositiveInt | None = None
    """Answers in flight at most; a call for three answers counts as three."""
    tokens_per_minute: PositiveTokens | None = None
    """Tokens of prompts and outputs together, on average; after a quiet minute they may all come at
    once. An answer that has begun is not stopped: the next one waits."""
    max_in_flight_tokens: PositiveTokens | None = None
    """Tokens, of prompts and of outputs as long as they may become, of all answers in flight."""
    weight: Weight = 1.0
    """Its share of the pipeline beside other keys' when all want more than there is."""
    min_priority: Annotated[int, Field(ge=PRIORITIES.low, le=DEFAULT_PRIORITY)] = DEFAULT_PRIORITY
    """The earliest `priority` that its requests may have: without it none comes before those of
    others that name none."""
    may_watch: bool = False
    """Whether it may watch the scheduler: it sees when and how long requests of all keys are, and
    whose."""


class ApiKeyFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: tuple[ApiKey, ...]

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        names = Counter(key.name for key in self.keys)
        hashes = Counter(key.sha256 for key in self.keys)
        for key in self.keys:
            if names[key.name] > 1:
                raise ValueError(f"there are several keys named {key.name}")
            if hashes[key.sha256] > 1:
                raise ValueError(f"the key of {key.name} is somebody else's too")
        return self


class TokenBucket:
    """A limit of calls per minute; what is not used adds up to one minute's calls."""

    def __init__(self, per_minute: int, *, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def take(self, now: float) -> float:
        """Takes one call and returns 0, or returns the seconds until there is one to take."""
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._filled_at = now
        if self._level < 1:
            return (1 - self._level) * MINUTE_S / self.per_minute
        self._level -= 1
        return 0.0


class Account:
    """A caller, and what he has in use. Without a key there are no limits."""

    def __init__(
        self,
        key: ApiKey | None = None,
        *,
        now: float = 0.0,
        refusals: Refusals | None = None,
    ) -> None:
        self._refusals = Refusals() if refusals is None else refusals
        self._n_in_flight = 0
        self._max_in_flight: int | None = None
        self._min_priority = DEFAULT_PRIORITY
        self._may_watch = True
        self._bucket: TokenBucket | None = None
        self._message: scheduler_pb2.Account | None = None
        if key is not None:
            self.set_limits(key, now=now)

    def set_limits(self, key: ApiKey, *, now: float) -> None:
        """Sets the limits from now on; what is in use stays in use."""
        self._max_in_flight = key.max_in_flight
        self._min_priority = key.min_priority
        self._may_watch = key.may_watch
        self._message = scheduler_pb2.Account(
            name=key.name,
            tokens_per_minute=key.tokens_per_minute or 0,
            max_in_flight_tokens=key.max_in_flight_tokens or 0,
            weight=key.weight,
        )
        per_minute = key.requests_per_minute
        if per_minute is None:
            self._bucket = None
        elif self._bucket is None or self._bucket.per_minute != per_minute:
            self._bucket = TokenBucket(per_minute, now=now)

    @property
    def name(self) -> str:
        """Its name; empty without a key."""
        return "" if self._message is None else self._message.name

    @property
    def min_priority(self) -> int:
        """The most important priority that its requests may have."""
        return self._min_priority

    def check_watching(self) -> None:
        """Raises PermissionDenied if the caller may not watch the scheduler."""
        if not self._may_watch:
            raise errors.PermissionDenied("this API key may not watch: its entry lacks may_watch")

    def to_proto(self) -> scheduler_pb2.Account | None:
        """Returns the account as the scheduler is told of it, which enforces the limits in tokens;
        None without a key. The message must not be changed."""
        return self._message

    def count_call(self, now: float) -> None:
        """Counts a call against the limit per minute.

        Raises:
            PoolFull: there were too many.
        """
        wait_s = 0.0 if self._bucket is None else self._bucket.take(now)
        if self._bucket is not None and wait_s > 0:
            self._refusals[Refusal.KEY_RATE] += 1
            raise errors.PoolFull(
                f"this API key allows {self._bucket.per_minute} requests a minute",
                retry_after_s=wait_s,
            )

    def in_flight(self, request: GenerationRequest) -> AnswersInFlight:
        """Counts the answers of a request that has been checked as in flight until they end, or the
        returned context is closed.

        Raises:
            InvalidRequest: it has a priority that the caller may not give, or asks for more answers
            than can ever be in flight.
            PoolFull: there are too many at the moment.
        """
        if request.options.priority < self._min_priority:
            whose = "without an API key" if self._message is None else "with this API key"
            raise errors.InvalidRequest("priority", f"{whose} at least {self._min_priority}")
        limit, n_answers = self._max_in_flight, request.n_answers
        if limit is not None and n_answers > limit:
            self._refusals[Refusal.KEY_IN_FLIGHT] += 1
            raise errors.InvalidRequest(
                "n" if len(request.prompts) == 1 else "prompt",
                f"asks for {n_answers} answers at once; this API key allows {limit}",
            )
        return self._take(n_answers)

    def receiving(self) -> AnswersInFlight:
        """Counts a request that is being received as one answer in flight, until the returned
        context is closed.

        Raises:
            PoolFull: there are too many at the moment.
        """
        return self._take(1)

    def _take(self, n_answers: int) -> AnswersInFlight:
        limit = self._max_in_flight
        if limit is not None and self._n_in_flight + n_answers > limit:
            self._refusals[Refusal.KEY_IN_FLIGHT] += 1
            raise errors.PoolFull(
                f"this API key allows {limit} answers in the making",
                retry_after_s=DEFAULT_RETRY_AFTER_S,
            )
        self._n_in_flight += n_answers
        return AnswersInFlight(n_answers, self._release)

    def _release(self, n_answers: int) -> None:
        self._n_in_flight -= n_answers


class ApiKeys:
    """All keys; finds out who calls. Without a file anybody may call."""

    def __init__(
        self,
        path: Path | None,
        *,
        refusals: Refusals | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file.

        Raises:
            OSError: there is no file.
            ValueError: it is not what it should be; the message says where.
        """
        self.refusals = Refusals() if refusals is None else refusals
        self._now = now
        self._anybody = Account()
        self._accounts: dict[str, Account] = {}
        self._by_hash: dict[str, Account] = {}
        self._file: Mounted[bytes, ApiKeyFile] | None = None
        if path is not None:
            self._file = Mounted(path, path.read_bytes, lambda content: _parse(path, content))
            self._read_at = now()
            self._in_use = self._file.latest()
            self._set_accounts()

    @property
    def are_needed(self) -> bool:
        """Whether clients must show a key."""
        return self._file is not None

    def admit(self, authorization: str | None) -> Account:
        """Returns the account of a caller, by the value of `authorization` in headers or metadata,
        and counts a call.

        Raises:
            Unauthenticated: there is no key, or nobody has it.
            PoolFull: its calls are used up; says when there will be another.
        """
        account = self.account_of(authorization)
        account.count_call(self._now())
        return account

    def account_of(self, authorization: str | None) -> Account:
        """Returns the account of a caller without counting a call.

        Raises:
            Unauthenticated: there is no key, or nobody has it.
        """
        if self._file is None:
            return self._anybody
        self._refresh(self._file, self._now())
        key = _key_in(authorization)
        account = None if key is None else self._by_hash.get(hash_of(key))
        if account is None:
            self.refusals[Refusal.UNKNOWN_KEY] += 1
            if key is None:
                raise errors.Unauthenticated("an API key is needed: authorization: Bearer KEY")
            raise errors.Unauthenticated("this API key is not known here")
        return account

    def knows(self, authorization: str | None) -> bool:
        """Returns whether a caller may call, by the value of `authorization`; counts nothing."""
        if self._file is None:
            return True
        self._refresh(self._file, self._now())
        key = _key_in(authorization)
        return key is not None and hash_of(key) in self._by_hash

    def _refresh(self, file: Mounted[bytes, ApiKeyFile], now: float) -> None:
        if now - self._read_at < REREAD_S:
            return
        self._read_at = now
        latest = file.latest()
        if latest is not self._in_use:
            self._in_use = latest
            self._set_accounts()

    def _set_accounts(self) -> None:
        known, self._accounts, self._by_hash = self._accounts, {}, {}
        for key in self._in_use.keys:
            account = known.get(key.name) or Account(refusals=self.refusals)
            account.set_limits(key, now=self._read_at)
            self._accounts[key.name] = self._by_hash[key.sha256] = account


def hash_of(key: str) -> str:
    """Returns the hash of a key, which the file has in its place."""
    return hashlib.sha256(key.encode(errors="backslashreplace")).hexdigest()


def _key_in(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _parse(path: Path, content: bytes) -> ApiKeyFile:
    try:
        return ApiKeyFile.model_validate_json(content)
    except ValidationError as error:
        # Not pydantic's own text, which repeats the content.
        problems = (
            f"{'.'.join(map(str, item['loc'])) or 'content'}: {item['msg']}"
            for item in error.errors()
        )
        raise ValueError(f"{path}: {'; '.join(problems)}") from None


def main() -> int:
    """Prints a new key, which nobody can ever see again, and its entry in the file."""
    parser = argparse.ArgumentParser(
        prog="python -m services.frontend.api_keys",
        description="Makes an API key: the first line is for its holder, the second for the file.",
    )
    parser.add_argument("name", help="whose key it is")
    parser.add_argument("--requests-per-minute", type=int, metavar="N")
    parser.add_argument("--max-in-flight", type=int, metavar="N")
    parser.add_argument("--tokens-per-minute", type=int, metavar="N")
    parser.add_argument("--max-in-flight-tokens", type=int, metavar="N")
    parser.add_argument("--weight", type=float, default=argparse.SUPPRESS, metavar="X")
    parser.add_argument("--min-priority", type=int, default=argparse.SUPPRESS, metavar="N")
    parser.add_argument("--may-watch", action="store_true")
    arguments = parser.parse_args()
    secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    try:
        entry = ApiKey(sha256=hash_of(secret), **vars(arguments))
    except ValidationError as error:
        parser.error("; ".join(f"{item['loc'][0]}: {item['msg']}" for item in error.errors()))
    sys.stdout.write(
        f"{secret}\n{entry.model_dump_json(exclude_none=True, exclude_defaults=True)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
