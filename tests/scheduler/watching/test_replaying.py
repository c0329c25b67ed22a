"""A core that is run again on its decisions comes to the same batches, whatever happened to it."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import watch_pb2

from services.common.watch_json import HEADER, to_json
from services.scheduler.core.admission.grammar_gate import DueGrammar
from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.replay import NotARecording, replay
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.core_facts import CoreFacts, core_of, facts_of
from services.scheduler.watching.replaying import Difference, NotReplayable
from services.scheduler.watching.watcher import Watcher
from tests.scheduler.core.workload import build
from tests.scheduler.watching.play import Play

SETTINGS = st.builds(
    lambda way, **settings: SchedulerSettings(**way, **settings),
    way=st.sampled_from(
        [
            {"policy": "orca", "order": "fcfs"},
            {"policy": "orca", "order": "fair"},
            {"policy": "chunked", "order": "fcfs"},
            {"policy": "chunked", "order": "fair"},
            {"policy": "chunked", "order": "fair", "fair_batch_tokens": 2},
            {"policy": "shortest", "order": "fcfs"},
            {"policy": "aging", "order": "fair"},
            {"policy": "batchmaker", "order": "fcfs"},
            {"policy": "request_level", "order": "fcfs"},
        ]
    ),
    n_stages=st.sampled_from([1, 2]),
    admission=st.sampled_from(["reserve", "optimistic"]),
    prefix_cache=st.booleans(),
    ageing_s=st.sampled_from([1e-6, 30.0]),
    max_batch_size=st.sampled_from([1, 3]),
    max_batch_tokens=st.sampled_from([4, 32]),
    n_slots=st.sampled_from([32, 80]),
)


class Chance:
    """A life of a scheduler by chance."""

    def __init__(
        self,
        settings: SchedulerSettings,
        seed: int,
        *,
        windows: Sequence[int] = (),
        n_pipelines: int = 1,
    ) -> None:
        self.first = Play(settings, windows)
        self._others = [self.first.beside(number) for number in range(1, n_pipelines)]
        self._turn(self.first)
        self._source = random.Random(seed)
        self._requests: list[Request] = []
        self._flying: dict[int, list[Batch]] = {number: [] for number in range(n_pipelines)}
        self._orders: dict[int, DueGrammar] = {}
        self._accounts = [AccountUse(AccountLimits(weight=w), name=f"k{w}") for w in (1.0, 2.0)]

    def run(self, n_steps: int) -> None:
        """Lets some things happen."""
        steps: list[Callable[[], None]] = [self._submit] * 3 + [self._send] * 6
        steps += [self._return] * 6 + [self._cancel, self._expire, self._lose, self._learn]
        steps += [self._compile] * 2 + [self._be_late]
        plays = [self.first, *self._others]
        for play in plays:
            play.open()
        for _ in range(n_steps):
            self._turn(self._source.choice(plays))
            self._source.choice(steps)()
        for play in plays:
            self._turn(play)
            while self._in_flight:
                self._return()

    def _turn(self, play: Play) -> None:
        """Lets the next things happen to this pipeline."""
        self.play = play

    @property
    def _in_flight(self) -> list[Batch]:
        return self._flying[self.play.number]

    def _submit(self) -> None:
        source = self._source
        self._requests.append(
            self.play.submit(
                str(len(self._requests)),
                prompt=[1000 + source.randrange(2) for _ in range(source.randrange(1, 14))],
                max_new_tokens=source.randrange(1, 12),
                priority=source.randrange(-1, 2),
                account=source.choice([None, *self._accounts]),
                stop_token_ids=frozenset({999}),
                cache_scope=source.choice([None, b"one", b"another"]),
                grammar_digest=source.choice([None, None, b"x", b"y"]),
            )
        )

    def _compile(self) -> None:
        scheduler = self.play.scheduler
        compiling = self._orders.pop(self.play.number, None)
        if compiling is not None:
            failure = self._source.choice(["", "", "", "too large"])
            self.play.note(scheduler.note_grammar(compiling.digest, failure))
        elif (due := scheduler.next_grammar()) is not None:
            self._orders[self.play.number] = due

    def _send(self) -> None:
        batch = self.play.try_to_send()
        if batch is not None:
            self._in_flight.append(batch)

    def _return(self) -> None:
        if self._in_flight:
            tokens = [self._source.choice([1000, 1001, 1001, 999]) for _ in range(7)]
            self.play.give_back(self._in_flight.pop(0), *tokens)

    def _cancel(self) -> None:
        if self._requests:
            request = self._source.choice(self._requests)
            running = [play for play in self._others if request in play.pool.running]
            self.play.note((running or [self.first])[0].scheduler.cancel(request))

    def _learn(self) -> None:
        self.play.scheduler.learn_overhead(self._source.choice([8, 64, 512]))

    def _expire(self) -> None:
        waiting = list(self.play.pool.order)
        if waiting:
            self.play.submit("late", deadline=0.0)
            self.play.note(self.play.scheduler.expire(1.0))

    def _be_late(self) -> None:
        if self._in_flight:
            self.play.be_late()

    def _lose(self) -> None:
        self.play.lose()
        self._in_flight.clear()
        self._orders.pop(self.play.number, None)
        self.play.open(goes_on=self._source.random() < 0.7)


def lines_of(watcher: Watcher) -> list[bytes]:
    """The lines of a recording with all that a watcher was told."""
    return [
        json.dumps(value).encode() + b"\n"
        for value in (HEADER, *(to_json(event) for event in asyncio.run(all_of(watcher))))
    ]


async def all_of(watcher: Watcher) -> list[watch_pb2.WatchEvent]:
    """All that waits for a watcher."""
    watcher.end("over")
    events: list[watch_pb2.WatchEvent] = []
    while watcher.n_pending:
        events += (await watcher.next_message()).events
    return events


def recording(
    settings: SchedulerSettings,
    seed: int,
    n_steps: int,
    *,
    windows: Sequence[int] = (),
    n_pipelines: int = 1,
) -> list[bytes]:
    """The lines of a recording of a life by chance."""

    async def run() -> Watcher:
        chance = Chance(settings, seed, windows=windows, n_pipelines=n_pipelines)
        with chance.first.watching.watch(has_decisions=True) as watcher:
            chance.run(n_steps)
        return watcher

    return lines_of(asyncio.run(run()))


@given(
    SETTINGS,
    st.integers(0, 2**32),
    st.sampled_from([(), (6,), (0, 6, 6)]),
    st.sampled_from([1, 2, 3]),
)
def test_a_replay_comes_to_the_same_batches(
    settings: SchedulerSettings, seed: int, windows: tuple[int, ...], n_pipelines: int
) -> None:
    lines = recording(settings, seed, 80, windows=windows, n_pipelines=n_pipelines)
    n_batches = sum(b'"selection": {"iteration"' in line for line in lines)
    assert replay(lines).n_batches == n_batches


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    """A recording."""
    settings = SchedulerSettings(n_stages=2, max_batch_size=3, n_slots=80)
    return recording(settings, 2, 200)


def changed(
    lines: list[bytes], field: str, change: Callable[[Any], Any], place: int
) -> list[bytes]:
    """A recording in which one decision of a kind is another."""
    found = [index for index, line in enumerate(lines) if f'"{field}"'.encode() in line]
    value = json.loads(lines[found[place]])
    value[field] = change(value[field])
    return [
        *lines[: found[place]],
        json.dumps(value).encode() + b"\n",
        *lines[found[place] + 1 :],
    ]


@pytest.mark.parametrize(
    ("field", "change", "said"),
    [
        ("submission", lambda it: {**it, "prompt_token_ids": [1] * 9}, "iteration"),
        ("selection", lambda it: {**it, "numbers": [77]}, r"numbers is \[77\] in the recording"),
        ("result", lambda it: {**it, "token_ids": []}, "0 tokens"),
    ],
    ids=["request", "batch", "tokens"],
)
def test_a_file_that_was_changed_is_found_out(
    lines: list[bytes], field: str, change: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(Difference, match=said) as caught:
        replay(changed(lines, field, change, 0))
    assert str(caught.value).startswith("line ")


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there are numbers in a value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, each in items for found in numbers_in(each, (*path, key))]
    return [path] if isinstance(value, int) else []


@given(data=st.data())
def test_whatever_was_changed_is_found_out_or_does_not_matter(
    lines: list[bytes], data: st.DataObject
) -> None:
    lines = [line for line in lines[1:] if b'"decision"' in line]
    index = data.draw(st.integers(0, len(lines) - 1))
    value = json.loads(lines[index])
    what = data.draw(st.sampled_from(["drop", "double", "change", "change", "change"]))
    changed_lines = {"drop": [], "double": [value, value], "change": [value]}[what]
    if what == "change" and (paths := numbers_in(value)):
        *path, last = data.draw(st.sampled_from(paths))
        inner = value
        for key in path:
            inner = inner[key]
        inner[last] = data.draw(st.integers(-1, 40) | st.just(2**32 - 1))
    made = [json.dumps(each).encode() + b"\n" for each in changed_lines]
    header = json.dumps(HEADER).encode() + b"\n"
    with contextlib.suppress(Difference, NotReplayable, NotARecording):
        replay([header, *lines[:index], *made, *lines[index + 1 :]])


def test_a_replay_gives_each_pipeline_its_own_requests() -> None:
    settings = SchedulerSettings(n_stages=1, max_batch_size=3, n_slots=80)
    lines = recording(settings, 7, 200, n_pipelines=2)
    objects = list(map(json.loads, lines))
    cores = [json.loads(one["core"])["pipeline"] for one in objects if "core" in one]
    assert cores[:2] == [0, 1]
    assert len(cores) > 3, "both pipelines were lost and formed again"
    admitted = [one for one in objects if one.get("turn") == "admitted"]
    assert {one["pipeline"] for one in admitted} == {0, 1}
    by_request: dict[int, set[int]] = {one["number"]: set() for one in admitted}
    for one in admitted:
        by_request[one["number"]].add(one["pipeline"])
    assert {0, 1} in by_request.values(), "a request has moved"
    assert replay(lines).n_batches > 20
    together = [line.replace(b'\\"pipeline\\": 1', b'\\"pipeline\\": 0') for line in lines]
    together = [line.replace(b'\\"pipeline\\":1', b'\\"pipeline\\":0') for line in together]
    assert together != lines
    with pytest.raises(Difference):
        replay(together)


def test_a_core_of_an_older_recording_is_of_the_first_pipeline() -> None:
    core = build(max_batch_size=4, n_blocks=9, block_size=4, pipeline_depth=1)
    facts = facts_of(core, is_first=True, pipeline=3)
    assert facts is not None
    assert facts.pipeline == 3
    assert CoreFacts.model_validate(facts.model_dump(exclude={"pipeline"})).pipeline == 0


def test_a_decision_that_is_missing_is_found_out(lines: list[bytes]) -> None:
    results = [index for index, line in enumerate(lines) if b'"result"' in line]
    with pytest.raises(Difference):
        replay(lines[: results[2]] + lines[results[2] + 1 :])


def test_a_replay_begins_as_many_prompts_as_were_begun_once_more_was_known() -> None:
    async def run() -> Watcher:
        play = Play(SchedulerSettings(n_stages=1, max_batch_size=16, order="fcfs"))
        with play.watching.watch(has_decisions=True) as watcher:
            play.open()
            for overhead_tokens in (64, 8, 8, 512):
                play.scheduler.learn_overhead(overhead_tokens)
                for index in range(12):
                    play.submit(f"{overhead_tokens} {index}", prompt=[1] * 28, max_new_tokens=1)
                while (batch := play.try_to_send()) is not None:
                    play.give_back(batch)
        return watcher

    lines = lines_of(asyncio.run(run()))
    told = [line for line in lines if b'"overhead_tokens"' in line]
    assert len(told) == 2, "only what is news is told"
    n_batches = sum(b'"selection": {"iteration"' in line for line in lines)
    assert replay(lines).n_batches == n_batches
    for line in told:
        with pytest.raises(Difference, match="numbers"):
            replay([each for each in lines if each != line])


def test_a_replay_cuts_no_prompt_that_runs_whole() -> None:
    async def run() -> Watcher:
        settings = SchedulerSettings(n_stages=1, max_batch_size=4, max_batch_tokens=8)
        play = Play(settings)
        with play.watching.watch(has_decisions=True) as watcher:
            play.open()
            for index, n_prompt in enumerate((5, 5, 3)):
                play.submit(
                    f"{index}",
                    prompt=[1] * n_prompt,
                    max_new_tokens=0,
                    runs_whole=True,
                    cache_scope=None,
                )
            while (batch := play.try_to_send()) is not None:
                play.give_back(batch)
        return watcher

    lines = lines_of(asyncio.run(run()))
    assert replay(lines).n_batches == 2
    cut = [line.replace(b'"runs_whole": true', b'"runs_whole": false') for line in lines]
    assert cut != lines
    with pytest.raises(Difference):
        replay(cut)


def test_calls_with_named_arguments_are_told() -> None:
    async def run() -> Watcher:
        play = Play()
        with play.watching.watch(has_decisions=True) as watcher:
            play.open()
            given_up, asked, _ = play.submit("a"), play.submit("b"), play.submit("c")
            play.scheduler.give_up(request=given_up, message="why")
            batch = play.send()
            play.scheduler.apply(
                iteration=batch.iteration, token_ids=[5, 0], logprobs={}, broken=[1]
            )
            play.scheduler.cancel(request=asked)
            play.scheduler.suspend(iteration=0, is_by_itself=True)
        return watcher

    assert replay(lines_of(asyncio.run(run()))).n_batches == 1


def test_recordings_have_no_tokens(lines: list[bytes]) -> None:
    numbers: set[int] = set()
    for line in lines:
        numbers.update(json.loads(line).get("submission", {}).get("prompt_token_ids", ()))
    assert numbers < set(range(6)), "the prompts are of five tokens, 1000 and 1001 among them"


def test_a_recording_that_ends_within_a_line_is_replayed_so_far(lines: list[bytes]) -> None:
    assert replay([*lines[:-1], lines[-1][:5]]).n_batches > 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([b"hello\n"], "line 1 is not JSON"),
        ([b'{"a": 1}\n'], "line 1 is no event"),
        ([b'{"type": "epoch"}\n'], "not that of a recording"),
        ([b'{"type": "recording", "version": 1}\n'], "version 1"),
        ([json.dumps(HEADER).encode() + b"\n", b"[]\n"], "line 2 is no event"),
        (
            [json.dumps(HEADER).encode() + b"\n", b'{"type": "decision", "x": 1}\n'],
            "line 2 is no decision",
        ),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[bytes], said: str) -> None:
    with pytest.raises(NotARecording, match=said):
        replay(lines)


def test_a_recording_without_all_decisions_is_refused(lines: list[bytes]) -> None:
    without = [line for line in lines if b'"type": "decision"' not in line]
    with pytest.raises(NotReplayable, match="no decisions"):
        replay(without)
    cores = [index for index, line in enumerate(lines) if b'"core"' in line]
    with pytest.raises(NotReplayable, match="does not begin with the first decision"):
        replay([lines[0], *lines[cores[0] + 1 :]])


def test_a_core_of_facts_has_as_many_rows() -> None:
    core = build(max_batch_size=4, n_blocks=9, block_size=4, pipeline_depth=1, max_rows=3)
    facts = facts_of(core, is_first=True)
    assert facts is not None
    assert core_of(facts, RequestPool(max_requests=8)).kv_manager.rows.max_rows == 3
    older = facts.model_dump(exclude={"max_rows"})
    assert CoreFacts.model_validate(older).max_rows is None
