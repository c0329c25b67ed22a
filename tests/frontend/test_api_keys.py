"""API keys: the file of keys, the limits, the program that makes keys."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.api_keys import (
    KEY_PREFIX,
    REREAD_S,
    Account,
    ApiKey,
    ApiKeys,
    CallBucket,
    hash_of,
)
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.texts_field import TextsField
from tests.limits import HANG_S


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def entry(name: str, key: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_of(key), **limits}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": entries}))
    return path


def answers(n: int, n_prompts: int = 1) -> GenerationRequest:
    return GenerationRequest(prompts=("x",) * n_prompts, options=GenerationOptions(n=n))


def with_priority(priority: int) -> GenerationRequest:
    return GenerationRequest(prompts=("x",), options=GenerationOptions(priority=priority))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.json", entry("alice", "a"), entry("bob", "b"))


# What the scheduler is told


def test_the_scheduler_is_told_who_calls_and_the_limits_in_tokens(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.json",
        entry("alice", "a", tokens_per_minute=1000, max_in_flight_tokens=50),
        entry("bob", "b", requests_per_minute=5, weight=2.5),
    )
    keys = ApiKeys(path)
    told = scheduler_pb2.Account(
        name="alice", tokens_per_minute=1000, max_in_flight_tokens=50, weight=1
    )
    assert keys.account_of("Bearer a").to_proto() == told
    assert keys.account_of("Bearer b").to_proto() == scheduler_pb2.Account(name="bob", weight=2.5)


def test_the_scheduler_is_told_of_nobody_where_there_are_no_keys() -> None:
    assert ApiKeys(None).account_of(None).to_proto() is None


def test_the_scheduler_is_told_of_limits_that_change(path: Path, clock: Clock) -> None:
    keys = ApiKeys(path, now=clock)
    account = keys.account_of("Bearer a")
    write(path, entry("alice", "a", tokens_per_minute=7))
    clock.now += REREAD_S
    assert keys.account_of("Bearer a") is account
    told = scheduler_pb2.Account(name="alice", tokens_per_minute=7, weight=1)
    assert account.to_proto() == told


# Who it is


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_a_key_is_recognised(path: Path, scheme: str) -> None:
    keys = ApiKeys(path)
    assert keys.admit(f"{scheme}a") is keys.admit("Bearer a")
    assert keys.admit("Bearer a") is not keys.admit("Bearer b")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "a", "Bearer", "Bearer ", "Basic a", "Bearer c", "Bearer a b", "Bearer ä\udcff"],
    ids=ascii,
)
def test_whoever_shows_no_known_key_is_nobody(path: Path, authorization: str | None) -> None:
    with pytest.raises(errors.Unauthenticated) as caught:
        ApiKeys(path).admit(authorization)
    assert "alice" not in caught.value.message


def test_a_hash_is_not_a_key(path: Path) -> None:
    with pytest.raises(errors.Unauthenticated):
        ApiKeys(path).admit(f"Bearer {hash_of('a')}")


def test_without_a_file_anybody_may_do_anything() -> None:
    keys = ApiKeys(None)
    for _ in range(1000):
        keys.admit(None).in_flight(answers(100))


# The file


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "content: Invalid JSON"),
        ("[]", "content: "),
        ('{"keys": [], "more": 1}', "more: Extra inputs"),
        ({"name": "a", "sha256": "12"}, r"keys\.0\.sha256"),
        ({"name": "a", "sha256": "g" * 64}, r"keys\.0\.sha256"),
        ({"name": "a"}, r"keys\.0\.sha256: Field required"),
        ({"name": "a b", "sha256": "0" * 64}, r"keys\.0\.name"),
        ({"name": "", "sha256": "0" * 64}, r"keys\.0\.name"),
        ({**entry("a", "a"), "requests_per_minute": 0}, r"keys\.0\.requests_per_minute"),
        ({**entry("a", "a"), "max_in_flight": "8"}, r"keys\.0\.max_in_flight"),
        ({**entry("a", "a"), "weight": 0}, r"keys\.0\.weight"),
        ({**entry("a", "a"), "min_priority": 1}, r"keys\.0\.min_priority"),
        ({**entry("a", "a"), "admin": True}, r"keys\.0\.admin: Extra inputs"),
        ([entry("a", "a"), entry("a", "b")], "several keys named a"),
        ([entry("a", "a"), entry("b", "a")], "the key of a is somebody else's too"),
        (
            [entry("a", "a"), {"name": "b", "sha256": hash_of("a").upper()}],
            "the key of a is somebody else's too",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_place(
    tmp_path: Path, content: Any, complaint: str
) -> None:
    path = tmp_path / "keys.json"
    if not isinstance(content, str):
        entries = content if isinstance(content, list) else [content]
        content = json.dumps({"keys": entries})
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"keys\.json: .*{complaint}") as caught:
        ApiKeys(path)
    assert hash_of("a") not in str(caught.value), "not even hashes belong into logs"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"keys\.json"):
        ApiKeys(tmp_path / "keys.json")


def test_a_hash_may_be_written_in_capitals(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", {"name": "a", "sha256": hash_of("a").upper()})
    ApiKeys(path).admit("Bearer a")


def test_a_changed_file_is_in_use_a_second_later(path: Path, clock: Clock) -> None:
    keys = ApiKeys(path, now=clock)
    write(path, entry("alice", "new"), entry("bob", "b"))
    keys.admit("Bearer a")
    clock.now += REREAD_S
    keys.admit("Bearer new")
    with pytest.raises(errors.Unauthenticated):
        keys.admit("Bearer a")
    write(path)
    clock.now += REREAD_S
    with pytest.raises(errors.Unauthenticated):
        keys.admit("Bearer new")


@pytest.mark.parametrize(
    "breaking",
    [lambda path: path.unlink(), lambda path: path.write_text('{"keys": [{')],
    ids=["missing", "half-written"],
)
def test_a_broken_file_leaves_the_keys_that_were_there(
    path: Path, clock: Clock, breaking: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(path, now=clock)
    breaking(path)
    for _ in range(3):
        clock.now += REREAD_S
        keys.admit("Bearer a")
    (complaint,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert str(path) in complaint.getMessage()
    write(path, entry("carol", "c"))
    clock.now += REREAD_S
    keys.admit("Bearer c")


# Limits


def test_calls_are_limited_by_the_minute_and_come_back_one_by_one(
    tmp_path: Path, clock: Clock
) -> None:
    keys = ApiKeys(
        write(tmp_path / "keys.json", entry("a", "a", requests_per_minute=6), entry("b", "b")),
        now=clock,
    )
    for _ in range(6):
        keys.admit("Bearer a")
    with pytest.raises(errors.PoolFull, match="6 requests a minute") as caught:
        keys.admit("Bearer a")
    assert caught.value.retry_after_s == pytest.approx(10)
    keys.admit("Bearer b")  # one key's limit is not another's
    clock.now += 10.001
    keys.admit("Bearer a")
    with pytest.raises(errors.PoolFull):
        keys.admit("Bearer a")


@given(
    per_minute=st.integers(1, 1000),
    pauses=st.lists(st.floats(0, 120, allow_subnormal=False), min_size=1, max_size=200),
)
def test_never_more_calls_than_a_minutes_worth_and_the_rate(
    per_minute: int, pauses: list[float]
) -> None:
    now, n_taken = 0.0, 0
    bucket = CallBucket(per_minute, now=now)
    for pause in pauses:
        now += pause
        wait_s = bucket.take(now)
        n_taken += wait_s == 0
        assert 0 <= wait_s <= 60 / per_minute
        assert n_taken <= per_minute + now * per_minute / 60 + 1e-6


def test_whoever_waits_as_long_as_told_is_served() -> None:
    bucket = CallBucket(1, now=0.0)
    assert bucket.take(0.0) == 0
    wait_s = bucket.take(1.0)
    assert wait_s > 0
    assert bucket.take(1.0 + wait_s + 1e-9) == 0


def limited(max_in_flight: int) -> Account:
    key = ApiKey(name="a", sha256=hash_of("a"), max_in_flight=max_in_flight)
    return Account(key)


def test_answers_in_flight_are_limited_and_come_back_once() -> None:
    account = limited(3)
    two = account.in_flight(answers(2))
    with pytest.raises(errors.PoolFull, match="3 answers"):
        account.in_flight(answers(2))
    one = account.in_flight(answers(1))
    two.close()
    two.close()
    with pytest.raises(errors.PoolFull):
        account.in_flight(answers(3))
    account.in_flight(answers(1, n_prompts=2)).close()
    with one:
        pass
    account.in_flight(answers(3))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (answers(4), "n"),
        (answers(1, 4), "prompt"),
        (replace(answers(1, 4), texts_field=TextsField("documents")), "documents"),
    ],
)
def test_more_answers_than_can_ever_be_in_flight_are_a_mistake(
    request_: GenerationRequest, field: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match="allows 3") as caught:
        limited(3).in_flight(request_)
    assert caught.value.field == field


def test_a_key_comes_no_earlier_than_its_entry_allows(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "a", min_priority=-2), entry("bob", "b"))
    keys = ApiKeys(path)
    for key, earliest in (("a", -2), ("b", 0)):
        account = keys.account_of(f"Bearer {key}")
        with account.in_flight(with_priority(earliest)):
            pass
        with pytest.raises(
            errors.InvalidRequest, match=f"with this API key at least {earliest}"
        ) as error:
            account.in_flight(with_priority(earliest - 1))
        assert error.value.field == "priority"
    with pytest.raises(errors.InvalidRequest, match="without an API key at least 0"):
        ApiKeys(None).account_of(None).in_flight(with_priority(-1))


def test_another_key_of_the_same_holder_does_not_renew_his_limits(
    tmp_path: Path, clock: Clock
) -> None:
    limits = {"requests_per_minute": 2, "max_in_flight": 1}
    path = write(tmp_path / "keys.json", entry("a", "old", **limits))
    keys = ApiKeys(path, now=clock)
    share = keys.admit("Bearer old").in_flight(answers(1))
    write(path, entry("a", "new", **limits))
    clock.now += REREAD_S
    account = keys.admit("Bearer new")
    with pytest.raises(errors.PoolFull):
        keys.admit("Bearer new")
    with pytest.raises(errors.PoolFull):
        account.in_flight(answers(1))
    share.close()
    account.in_flight(answers(1))


def test_changed_limits_are_for_those_who_are_known_too(tmp_path: Path, clock: Clock) -> None:
    path = write(tmp_path / "keys.json", entry("a", "a", requests_per_minute=1))
    keys = ApiKeys(path, now=clock)
    keys.admit("Bearer a")
    write(path, entry("a", "a", max_in_flight=1))
    clock.now += REREAD_S
    for _ in range(10):
        account = keys.admit("Bearer a")
    account.in_flight(answers(1))
    with pytest.raises(errors.PoolFull):
        account.in_flight(answers(1))


def test_only_keys_that_say_so_may_watch_and_without_a_file_anybody(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "a", may_watch=True), entry("bob", "b"))
    keys = ApiKeys(path)
    keys.admit("Bearer a").check_watching()
    with pytest.raises(errors.PermissionDenied, match="may_watch"):
        keys.admit("Bearer b").check_watching()
    ApiKeys(None).admit(None).check_watching()


def test_only_keys_that_say_so_may_manage_and_without_a_file_anybody(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "a", manage=True), entry("bob", "b"))
    keys = ApiKeys(path)
    keys.admit("Bearer a").check_managing()
    with pytest.raises(errors.PermissionDenied, match="manage"):
        keys.admit("Bearer b").check_managing()
    ApiKeys(None).admit(None).check_managing()


# The program


def make_key(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.frontend.api_keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_the_program_makes_a_key_that_its_entry_admits(tmp_path: Path) -> None:
    limits = {
        "requests_per_minute": 60,
        "max_in_flight": 8,
        "tokens_per_minute": 90_000,
        "max_in_flight_tokens": 7,
        "weight": 2.5,
        "min_priority": -3,
    }
    options = [f"--{name.replace('_', '-')}={limit}" for name, limit in limits.items()]
    made = make_key("alice", *options, "--may-watch", "--manage")
    assert made.returncode == 0, made.stderr
    key, line = made.stdout.splitlines()
    assert key.startswith(KEY_PREFIX)
    assert len(key) > 40
    assert json.loads(line) == {**entry("alice", key), **limits, "may_watch": True, "manage": True}
    ApiKeys(write(tmp_path / "keys.json", json.loads(line))).admit(f"Bearer {key}")


def test_the_program_refuses_what_the_file_would(tmp_path: Path) -> None:
    made = make_key("alice and bob", "--max-in-flight=0")
    assert made.returncode == 2
    assert not made.stdout
    assert "name: " in made.stderr
    assert "max_in_flight: " in made.stderr
