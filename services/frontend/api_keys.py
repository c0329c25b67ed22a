"""API keys: which callers may use the public API, and how much each may use. The servers of both
protocols, HTTP and gRPC, check callers with this module.

A file, mounted from a Secret, has a name, a hash and limits for each key:

    {"keys": [{"name": "alice", "sha256": "9f86d0…", "requests_per_minute": 60}]}

Keys are random and long, so a plain SHA-256 suffices to hide them. A key is looked up by its hash,
so the time of a comparison does not reveal how much of a guess was right. A changed file is in use
a second later. Limits belong to names: when a name gets another key, the usage that is counted for
the name stays. Each frontend enforces the limits of calls and answers for its own callers. The
scheduler enforces the limits of tokens, over all frontends.

`python -m services.frontend.api_keys NAME` makes a key and its entry in the file.
"""

import argparse
import hashlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
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
from services.common.settings import ModelName
from services.frontend.request.answers_in_flight import AnswersInFlight
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.refusals import Refusal, Refusals

KEY_PREFIX = "orc-"
"""Prefix of every key, by which scanners of repositories recognise a leaked key."""

KEY_BYTES = 32

REREAD_S = 1.0
"""Shortest time in seconds between two checks of whether the file of keys has changed."""

MINUTE_S = 60.0

PositiveTokens = Annotated[int, Field(gt=0, lt=2**63)]
"""Type of a limit in tokens: a positive integer below 2**63."""

Weight = Annotated[float, Field(ge=0.001, le=1000)]
"""Type of a key's weight: the share of the pipeline that the key gets, relative to other keys."""


class ApiKey(BaseModel):
    """The entry of one API key in the file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
    requests_per_minute: PositiveInt | None = None
    """Largest number of calls of any method per minute, on average. After a minute without calls,
    the calls of one minute may come at once."""
    max_in_flight: PositiveInt | None = None
    """Largest number of answers of the key in flight at a time. A call for three answers counts as
    three."""
    tokens_per_minute: PositiveTokens | None = None
    """Largest number of tokens of prompts and outputs per minute, on average. After a minute
    without requests, the tokens of one minute may be used at once. An answer that has begun is not
    stopped when the limit is reached: the next answer waits."""
    max_in_flight_tokens: PositiveTokens | None = None
    """Largest number of tokens of all answers of the key in flight. An answer counts as the tokens
    of its prompt plus the largest number of tokens that its output may have."""
    weight: Weight = 1.0
    """Share of the pipeline that the key gets, relative to other keys. The weight matters only
    while the keys together ask for more than the pipeline can do."""
    min_priority: Annotated[int, Field(ge=PRIORITIES.low, le=DEFAULT_PRIORITY)] = DEFAULT_PRIORITY
    """Best `priority` that requests of the key may have; a lower number is a better priority. With
    the default, no request of the key comes before requests that name no priority."""
    models: Annotated[tuple[ModelName, ...], Field(min_length=1)] | None = None
    """Names of the models and adapters that the key may use; null for all. The name of a model
    includes its adapters. Requests of the key to other models and adapters are refused as if these
    were not served."""
    may_watch: bool = False
    """Whether the key may watch the scheduler. A viewer sees the requests of all keys: when each
    runs, how long it is, and to which key it belongs."""
    manage: bool = False
    """Whether the key may load and unload adapters, if the workers' setting
    `allowed_adapter_sources` allows any."""


class ApiKeyFile(BaseModel):
    """The content of the file of API keys."""

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


class CallBucket:
    """Limits the calls per minute by a token bucket. The bucket holds at most the calls of one
    minute."""

    def __init__(self, per_minute: int, *, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def take(self, now: float) -> float:
        """Takes one call from the bucket and returns 0.0. If the bucket has less than one call,
        takes nothing, and returns the seconds until it has one. `now` is the time in seconds."""
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._filled_at = now
        if self._level < 1:
            return (1 - self._level) * MINUTE_S / self.per_minute
        self._level -= 1
        return 0.0


class Account:
    """The account of a caller: enforces the limits of the caller's key, and counts the caller's
    answers in flight. An account without a key has no limits, but its requests may not have a
    better priority than the default."""

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
        self._models: frozenset[str] | None = None
        self._may_watch = True
        self._may_manage = True
        self._bucket: CallBucket | None = None
        self._message: scheduler_pb2.Account | None = None
        if key is not None:
            self.set_limits(key, now=now)

    def set_limits(self, key: ApiKey, *, now: float) -> None:
        """Replaces the limits of the account by the limits of `key`. Answers that are already in
        flight count against the new limit."""
        self._max_in_flight = key.max_in_flight
        self._min_priority = key.min_priority
        self._models = None if key.models is None else frozenset(key.models)
        self._may_watch = key.may_watch
        self._may_manage = key.manage
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
            self._bucket = CallBucket(per_minute, now=now)

    @property
    def name(self) -> str:
        """Name of the key; empty for an account without a key."""
        return "" if self._message is None else self._message.name

    @property
    def min_priority(self) -> int:
        """Lowest `priority` that requests of the account may have. A lower number is a better
        priority."""
        return self._min_priority

    def may_use(self, names: Iterable[str]) -> bool:
        """Returns whether the account may use a model, or an adapter, that has these names."""
        return self._models is None or not self._models.isdisjoint(names)

    def check_managing(self) -> None:
        """Raises PermissionDenied if the caller may not load and unload adapters."""
        if not self._may_manage:
            raise errors.PermissionDenied("this API key may not do this: its entry lacks manage")

    def check_watching(self) -> None:
        """Raises PermissionDenied if the caller may not watch the scheduler."""
        if not self._may_watch:
            raise errors.PermissionDenied("this API key may not watch: its entry lacks may_watch")

    def to_proto(self) -> scheduler_pb2.Account | None:
        """Returns the account as a message for the scheduler, which enforces the limits in tokens.
        Returns None for an account without a key. Callers must not change the message."""
        return self._message

    def count_call(self, now: float) -> None:
        """Counts a call against the account's limit on calls per minute.

        Raises:
            PoolFull: the calls of this minute are used up.
        """
        wait_s = 0.0 if self._bucket is None else self._bucket.take(now)
        if self._bucket is not None and wait_s > 0:
            self._refusals[Refusal.KEY_RATE] += 1
            raise errors.PoolFull(
                f"this API key allows {self._bucket.per_minute} requests a minute",
                retry_after_s=wait_s,
            )

    def in_flight(self, request: GenerationRequest) -> AnswersInFlight:
        """Counts the answers of a request as in flight, until they end or the returned context is
        closed. Call it only with a request that has been checked.

        Raises:
            InvalidRequest: the request has a priority that the account does not allow, or asks for
            more answers than the account may ever have in flight.
            PoolFull: too many answers of the account are in flight.
        """
        if request.options.priority < self._min_priority:
            whose = "without an API key" if self._message is None else "with this API key"
            raise errors.InvalidRequest("priority", f"{whose} at least {self._min_priority}")
        limit, n_answers = self._max_in_flight, request.n_answers
        if limit is not None and n_answers > limit:
            self._refusals[Refusal.KEY_IN_FLIGHT] += 1
            raise errors.InvalidRequest(
                request.n_answers_field,
                f"asks for {n_answers} answers at once; this API key allows {limit}",
            )
        return self._take(n_answers)

    def receiving(self) -> AnswersInFlight:
        """Counts a request that is being received as one answer in flight, until the returned
        context is closed.

        Raises:
            PoolFull: too many answers of the account are in flight.
        """
        return self._take(1)

    def _take(self, n_answers: int) -> AnswersInFlight:
        limit = self._max_in_flight
        if limit is not None and self._n_in_flight + n_answers > limit:
            self._refusals[Refusal.KEY_IN_FLIGHT] += 1
            raise errors.PoolFull(f"this API key allows {limit} answers in the making")
        self._n_in_flight += n_answers
        return AnswersInFlight(n_answers, self._release)

    def _release(self, n_answers: int) -> None:
        self._n_in_flight -= n_answers


class ApiKeys:
    """Holds the API keys of a file, and an account for each key. If there is no file, every caller
    may use the API."""

    def __init__(
        self,
        path: Path | None,
        *,
        refusals: Refusals | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file of keys at `path`. If `path` is None, no key is needed.

        Raises:
            OSError: the file cannot be read.
            ValueError: the content is wrong. The message says where.
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
        """Whether clients must present an API key."""
        return self._file is not None

    def admit(self, authorization: str | None) -> Account:
        """Returns the account of a caller and counts a call. `authorization` is the value of the
        HTTP header, or of the gRPC metadata entry, of that name.

        Raises:
            Unauthenticated: there is no key, or it is unknown.
            PoolFull: the calls of the key are used up. The error says when another call is allowed.
        """
        account = self.account_of(authorization)
        account.count_call(self._now())
        return account

    def account_of(self, authorization: str | None) -> Account:
        """Returns the account of a caller, as `admit` does, but counts no call.

        Raises:
            Unauthenticated: there is no key, or it is unknown.
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
        """Returns whether a caller may use the API. `authorization` is the value of the caller's
        HTTP header, or gRPC metadata entry, of that name. Counts no call."""
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
    """Returns the SHA-256 of a key in hexadecimal. The file of keys contains this hash in place of
    the key."""
    return hashlib.sha256(key.encode(errors="backslashreplace")).hexdigest()


def _key_in(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _parse(path: Path, content: bytes) -> ApiKeyFile:
    try:
        return ApiKeyFile.model_validate_json(content)
    except ValidationError as error:
        # The text of pydantic itself is left out, since it repeats the content.
        problems = (
            f"{'.'.join(map(str, item['loc'])) or 'content'}: {item['msg']}"
            for item in error.errors()
        )
        raise ValueError(f"{path}: {'; '.join(problems)}") from None


def main() -> int:
    """Prints a new key and its entry for the file of keys. The key itself is not stored
    anywhere."""
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
    parser.add_argument("--model", dest="models", action="append", metavar="NAME")
    parser.add_argument("--may-watch", action="store_true")
    parser.add_argument("--manage", action="store_true")
    arguments = parser.parse_args()
    arguments.models = arguments.models and tuple(arguments.models)
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
