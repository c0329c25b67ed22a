"""Streams that break go on, at any frontend and over both protocols, with what their clients lack.

A scheduler that knows what every answer is to be stands for one whose tokens do not depend on who
asks for them.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.frontend.generation import inbox
from tests.fake_scheduler import (
    PIPELINE,
    FakeRequest,
    FakeScheduler,
    echo,
    keeps_quiet,
    says,
    stalls_after,
)
from tests.frontend.conftest import Site, running, soon
from tests.generation_options import generation_options
from tests.stream_content import together

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
# More of them where there is time: each reads a stream again from each of its pieces on.
N_EXAMPLES = settings().max_examples // 3
HELLO = [{"role": "user", "content": "hello"}]
DONE = b"data: [DONE]"
ID = re.compile(rb"id: ([0-9a-f]{32}):(\S+)\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Another frontend, which knows nothing of the first."""
    async with running(tmp_path_factory.mktemp("checkpoint")) as site:
        yield site


@dataclass
class Oracle:
    """A behaviour that knows the tokens of each answer, and brings `burst` of them at a time."""

    answers: Sequence[Sequence[int]]
    burst: int = 1
    ends_with_tokens: bool = False
    contradicted: list[str] = field(default_factory=list)
    """Requests that came with tokens which are not their answer's."""

    async def __call__(self, request: FakeRequest) -> None:
        submission = request.submission
        index = int(request.request_id.rpartition("-")[2])
        tokens = list(itertools.islice(itertools.cycle(self.answers[index]), 200))
        stops, n_min = submission.sampling.stop_token_ids, submission.sampling.min_tokens
        tokens[:n_min] = [3 if token in stops else token for token in tokens[:n_min]]
        if list(submission.generated_token_ids) != tokens[: request.n_tokens]:
            self.contradicted.append(request.request_id)
        request.accept()
        while True:
            end = request.n_tokens - request.n_tokens % self.burst + self.burst
            new = tokens[request.n_tokens : min(end, submission.max_new_tokens)]
            ends = [place for place, token in enumerate(new, start=1) if token in stops]
            new = new[: ends[0]] if ends else new
            is_last = bool(ends) or request.n_tokens + len(new) == submission.max_new_tokens
            reason = (
                scheduler_pb2.COMPLETION_REASON_STOP
                if ends
                else scheduler_pb2.COMPLETION_REASON_LENGTH
            )
            if is_last and self.ends_with_tokens and len(new) == 1:
                request.last_token(new[0], reason)
                return
            request.tokens(*new)
            await asyncio.sleep(0)
            if is_last:
                request.complete(reason)
                return


@dataclass(frozen=True)
class Case:
    """A request, and what its answers are to be."""

    is_chat: bool
    n_prompts: int
    options: dict[str, Any]
    http_options: dict[str, Any]
    answers: list[list[str]]
    burst: int
    ends_with_tokens: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def n_answers(self) -> int:
        return int(self.n_prompts * self.options["n"])

    @property
    def body(self) -> dict[str, Any]:
        prompts = ["a世", "b"][: self.n_prompts]
        prompt = {"messages": HELLO} if self.is_chat else {"prompt": prompts}
        return {**prompt, **self.options, **self.http_options, "stream": True}

    def oracle(self, site: Site) -> Oracle:
        """Returns the behaviour; characters of several bytes are as many tokens."""
        tokens = {
            name: [EOS] if name == "eos" else list(site.tokens(name)) for name in ("eos", *"ab世🐋")
        }
        tokens["half"] = tokens["世"][:1]
        answers = [[token for name in answer for token in tokens[name]] for answer in self.answers]
        return Oracle(answers, self.burst, self.ends_with_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    is_chat = draw(st.booleans())
    n, n_prompts = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]))
    n_prompts = 1 if is_chat else n_prompts
    max_tokens = draw(st.integers(1, 14))
    options = {
        "n": n,
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "stop": draw(st.lists(st.text("ab世", min_size=1, max_size=4), max_size=2)),
        "ignore_eos": draw(st.booleans()),
        "return_token_ids": True,
    }
    http_options: dict[str, Any] = {}
    if draw(st.booleans()):
        http_options["stream_options"] = {"include_usage": True}
    if not is_chat and draw(st.booleans()):
        http_options["echo"] = True
    if draw(st.booleans()):
        n_top = draw(st.integers(0, 2))
        http_options |= (
            {"logprobs": True, "top_logprobs": n_top} if is_chat else {"logprobs": n_top}
        )
    words = st.sampled_from(["a", "b", "a", "b", "世", "🐋", "half", "eos"])
    answer = st.lists(words, min_size=1, max_size=8)
    return Case(
        is_chat=is_chat,
        n_prompts=n_prompts,
        options=options,
        http_options=http_options,
        answers=[draw(answer) for _ in range(n * n_prompts)],
        burst=draw(st.sampled_from([1, 1, 3])),
        ends_with_tokens=draw(st.booleans()),
    )


def frames(response: httpx.Response) -> list[bytes]:
    """The events of a stream that came to its end, as bytes."""
    assert response.status_code == 200, response.text
    *found, done, nothing = response.content.split(b"\n\n")
    assert (done, nothing) == (DONE, b"")
    return found


def chunk_of(frame: bytes) -> Any:
    """The JSON in an event."""
    return json.loads(frame.partition(b"data: ")[2])


def index_of(frame: bytes) -> int | None:
    """The answer that an event is of; None for the usage."""
    choices = chunk_of(frame)["choices"]
    return choices[0]["index"] if choices else None


def resumption(received: Sequence[bytes], n_answers: int = 1) -> dict[str, Any]:
    """Returns the fields that a client posts besides the request after these events."""
    tokens: list[list[int]] = [[] for _ in range(n_answers)]
    for frame in received:
        for choice in chunk_of(frame)["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    match = ID.match(received[-1])
    assert match is not None
    return {
        "headers": {"Last-Event-ID": b":".join(match.groups()).decode()},
        "body": {"resumption": {"seed": chunk_of(received[0])["seed"], "token_ids": tokens}},
    }


async def resume(site: Site, path: str, body: dict[str, Any], so_far: dict[str, Any]) -> Any:
    return await site.http.post(path, json=body | so_far["body"], headers=so_far["headers"])


def by_answer(found: Sequence[bytes]) -> dict[int | None, dict[str, Any]]:
    """What the events of each answer say together. How its tokens are spread over events depends on
    when they come."""
    said: dict[int | None, dict[str, Any]] = {}
    for frame in found:
        chunk = chunk_of(frame)
        choices = chunk.pop("choices")
        of_answer = said.setdefault(index_of(frame), {"choice": {}})
        for name, value in chunk.items():
            assert of_answer.setdefault(name, value) == value
        for choice in choices:
            of_answer["choice"] = together(of_answer["choice"], choice)
    return said


@settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
async def test_stream_that_breaks_anywhere_goes_on_as_if_it_had_not(
    site: Site, elsewhere: Site, case: Case
) -> None:
    oracle = site.scheduler.behaviour = elsewhere.scheduler.behaviour = case.oracle(site)
    undisturbed = frames(await site.http.post(case.path, json=case.body))
    for n_received in range(1, len(undisturbed) + 1):
        received = undisturbed[:n_received]
        so_far = resumption(received, case.n_answers)
        rest = frames(await resume(elsewhere, case.path, case.body, so_far))
        assert by_answer(received + rest) == by_answer(undisturbed)
    assert not oracle.contradicted


def grpc_request(case: Case) -> inference_pb2.GenerateStreamRequest:
    options = generation_options(**case.options, echo=case.http_options.get("echo", False))
    if case.n_prompts > 1:
        prompts = [inference_pb2.Prompt(text=text) for text in case.body["prompt"]]
        return inference_pb2.GenerateStreamRequest(prompts=prompts, options=options)
    prompt = inference_pb2.Prompt(text="a世")
    if case.is_chat:
        turns = [inference_pb2.ChatMessage(role="user", content="hello")]
        prompt = inference_pb2.Prompt(conversation=inference_pb2.Conversation(messages=turns))
    options = generation_options(**case.options)
    if "logprobs" in case.http_options:
        options.logprobs = 2
    return inference_pb2.GenerateStreamRequest(prompt=prompt, options=options)


def grpc_resumption(received: Sequence[Any], n_answers: int) -> inference_pb2.Resumption:
    """Returns the resumption of a client that has received these messages."""
    answers = [inference_pb2.AnswerSoFar() for _ in range(n_answers)]
    for message in received:
        if message.HasField("choice"):
            answer = answers[message.choice.index]
            answer.token_ids.extend(message.choice.token_ids)
            answer.is_finished |= bool(message.choice.finish_reason)
    return inference_pb2.Resumption(
        request_id=received[0].request_id, seed=received[0].seed, answers=answers
    )


def said_of(index: int, messages: Sequence[Any]) -> Any:
    """What the messages of an answer say together."""
    said, text = inference_pb2.GenerateStreamResponse(), ""
    for message in messages:
        if message.choice.index == index:
            said.MergeFrom(message)
            text += message.choice.text
    said.choice.text = text
    return said


@settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
async def test_stream_that_breaks_anywhere_goes_on_over_grpc(
    site: Site, elsewhere: Site, case: Case
) -> None:
    oracle = site.scheduler.behaviour = elsewhere.scheduler.behaviour = case.oracle(site)
    request = grpc_request(case)
    *undisturbed, usage = [message async for message in site.inference.stream(request)]
    for n_received in range(1, len(undisturbed) + 1):
        received = undisturbed[:n_received]
        request.resumption.CopyFrom(grpc_resumption(received, case.n_answers))
        *rest, usage_then = [message async for message in elsewhere.inference.stream(request)]
        assert usage_then == usage
        for index in range(case.n_answers):
            assert said_of(index, received + rest) == said_of(index, undisturbed)
    assert not oracle.contradicted


@pytest.fixture
def tokens_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each message of the scheduler's be an event of its own, however late its reader is."""
    monkeypatch.setattr(inbox, "READ_AT_ONCE", 1)


async def stream(site: Site, **body: Any) -> list[bytes]:
    """The events of a stream that shows tokens."""
    request = {"prompt": "x", "stream": True, "return_token_ids": True, **body}
    return frames(await site.http.post("/v1/completions", json=request))


@pytest.mark.parametrize("seed", [-7, None], ids=["given", "drawn"])
async def test_first_chunk_names_the_seed(site: Site, seed: int | None) -> None:
    response = await site.http.post(
        "/v1/completions", json={"prompt": "x", "stream": True, "seed": seed, "n": 2}
    )
    first, *others = map(chunk_of, frames(response))
    submitted = site.scheduler.requests[0].submission.sampling.seed
    assert first["seed"] == submitted
    assert first["seed"] == seed or 0 <= first["seed"] < 2**53
    assert all("seed" not in chunk for chunk in others)


@pytest.mark.usefixtures("tokens_as_they_come")
async def test_ids_say_how_far_a_client_has_got(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("ab"))
    response = await site.http.post(
        "/v1/chat/completions",
        json={
            "messages": HELLO,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        },
    )
    found = frames(response)
    ids = [match.groups() for match in map(ID.match, found) if match]
    assert [position for _, position in ids] == [b"0", b"1", b"2", b"2f", b"2f;usage"]
    assert {request_id.decode() for request_id, _ in ids} == {
        chunk_of(frame)["id"].removeprefix("chatcmpl-") for frame in found
    }


@pytest.mark.usefixtures("tokens_as_they_come")
async def test_ids_of_several_answers_say_which_have_not_begun(site: Site) -> None:
    proceed = asyncio.Event()

    async def behave(request: FakeRequest) -> None:
        request.accept()
        if request.request_id.endswith("-1"):
            await proceed.wait()
        await says(*site.tokens("a"))(request)
        proceed.set()

    site.scheduler.behaviour = behave
    found = await stream(site, n=2, max_tokens=1)
    marks = [match[2] for match in map(ID.match, found) if match]
    assert marks == [b"1,-", b"1f,-", b"1f,1", b"1f,1f"]


async def test_stream_without_tokens_has_data_lines_only(site: Site) -> None:
    response = await site.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert all(frame.startswith(b"data: ") for frame in frames(response))


@pytest.mark.usefixtures("tokens_as_they_come")
async def test_resumed_request_keeps_its_name_seeds_and_limit(site: Site, elsewhere: Site) -> None:
    elsewhere.scheduler.requests.clear()
    elsewhere.scheduler.behaviour = echo
    found = await stream(site, n=2)
    so_far = resumption(found[:3], 2)
    body = {"prompt": "x", "stream": True, "return_token_ids": True, "n": 2}
    await resume(elsewhere, "/v1/completions", body, so_far)
    request_id = chunk_of(found[0])["id"].removeprefix("cmpl-")
    before, after = site.scheduler.requests, elsewhere.scheduler.requests
    for first, second in zip(before, after, strict=True):
        assert second.request_id.startswith(request_id)
        assert second.request_id != first.request_id
        assert second.submission.sampling == first.submission.sampling
        assert second.submission.max_new_tokens == first.submission.max_new_tokens
        assert second.submission.prompt_token_ids == first.submission.prompt_token_ids


@pytest.mark.usefixtures("tokens_as_they_come")
async def test_finished_answers_are_not_submitted_again(site: Site, elsewhere: Site) -> None:
    elsewhere.scheduler.requests.clear()
    elsewhere.scheduler.behaviour = echo
    body = {"prompt": "x", "stream": True, "return_token_ids": True, "max_tokens": 2}
    found = await stream(site, max_tokens=2)
    finish = chunk_of(found[-1])["choices"][0]
    assert (finish["token_ids"], finish["finish_reason"]) == ([], "length")
    for n_received, rest in ((len(found) - 1, found[-1:]), (len(found), [])):
        so_far = resumption(found[:n_received])
        response = await resume(elsewhere, "/v1/completions", body, so_far)
        assert frames(response) == rest
    assert not elsewhere.scheduler.requests


@pytest.mark.parametrize("is_finished", [False, True], ids=["not finished", "finished"])
@pytest.mark.parametrize("said", ["ab STOP", EOS, "abcd"], ids=["stop string", "EOS", "length"])
async def test_all_tokens_without_the_last_piece_are_answered_without_the_scheduler(
    site: Site, said: str | int, is_finished: bool
) -> None:
    tokens = [said] if isinstance(said, int) else site.tokens(said)
    request = inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(text="x"),
        options=generation_options(
            max_tokens=len(tokens) + (said != "abcd"), stop=["STOP"], return_token_ids=True
        ),
        resumption=inference_pb2.Resumption(
            request_id="0" * 32,
            seed=1,
            answers=[inference_pb2.AnswerSoFar(token_ids=tokens, is_finished=is_finished)],
        ),
    )
    *pieces, last = [message async for message in site.inference.stream(request)]
    assert last.usage.completion_tokens == len(tokens)
    assert not site.scheduler.requests
    if is_finished:
        assert not pieces
    else:
        (piece,) = pieces
        is_stop = said != "abcd"
        assert piece.choice.finish_reason == (
            inference_pb2.FINISH_REASON_STOP if is_stop else inference_pb2.FINISH_REASON_LENGTH
        )
        assert not piece.choice.token_ids


async def test_the_time_of_a_call_counts_while_its_tokens_wait_to_be_read(site: Site) -> None:
    so_far = {"seed": 5, "token_ids": [[3, 4]]}
    body = {"prompt": "x", "stream": True, "return_token_ids": True, "resumption": so_far}
    headers = {"last-event-id": ONE, "x-request-timeout": "0.1"}
    async with site.frontend._admission._replaying:  # those of another call are read
        answer = await soon(site.http.post("/v1/completions", json=body, headers=headers))
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timed_out")
    assert site.frontend._admission.n_in_flight == 0


@pytest.mark.usefixtures("tokens_as_they_come")
async def test_resumptions_of_one_stream_do_not_meet(site: Site) -> None:
    said = site.tokens("abcdef")
    body = {"prompt": "x", "stream": True, "return_token_ids": True, "max_tokens": 6}
    found = await stream_of(site, says(*said), body)
    so_far = resumption(found[:2])
    site.scheduler.behaviour = stalls_after(*said[:2])
    async with site.http.stream("POST", "/v1/completions", json=body):  # its end is not noticed
        site.scheduler.behaviour = keeps_quiet
        waiting = [
            asyncio.ensure_future(resume(site, "/v1/completions", body, so_far)) for _ in range(2)
        ]
        _, _, *both = await soon(site.scheduler.wait_requests(4))
        assert len({request.request_id for request in site.scheduler.requests}) == 4
        for request in both:
            await says(*said)(request)
        for response in waiting:
            assert found[:2] + frames(await soon(response)) == found


async def stream_of(site: Site, behaviour: Any, body: dict[str, Any]) -> list[bytes]:
    site.scheduler.behaviour = behaviour
    return frames(await site.http.post("/v1/completions", json=body))


REQUEST_ID = "6921f3aa" + "0" * 24
SO_FAR = {"seed": 5, "token_ids": [[3, 4]]}
ONE = f"{REQUEST_ID}:2"

WRONG: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "not a stream": (ONE, {"stream": False}, "resumption"),
    "no stream, no tokens": (ONE, {"stream": False, "resumption": None}, "resumption"),
    "no tokens": (ONE, {"resumption": None}, "resumption"),
    "no position": (None, {}, "Last-Event-ID"),
    "a position that is none": ("17", {}, "Last-Event-ID"),
    "another name": ("x" + ONE[1:], {}, "Last-Event-ID"),
    "usage before the end": (f"{ONE};usage", {}, "Last-Event-ID"),
    "fewer tokens than events": (f"{REQUEST_ID}:3", {}, "resumption.token_ids"),
    "an answer more in the id": (f"{ONE},1", {}, "resumption.token_ids"),
    "an answer less in the id": (
        ONE,
        {"resumption": {"seed": 5, "token_ids": [[3, 4], []]}},
        "resumption.token_ids",
    ),
    "another n in the id": (f"{ONE},-", {}, "resumption.token_ids"),
    "another n": (ONE, {"n": 2}, "resumption.token_ids"),
    "another number of prompts": (ONE, {"prompt": ["x", "y"]}, "resumption.token_ids"),
    "another seed": (ONE, {"seed": 6}, "resumption.seed"),
    "a seed that is none": (ONE, {"resumption": SO_FAR | {"seed": 2**63}}, "resumption.seed"),
    "a seed of another type": (ONE, {"resumption": SO_FAR | {"seed": "5"}}, "resumption.seed"),
    "no seed": (ONE, {"resumption": {"token_ids": [[3, 4]]}}, "resumption.seed"),
    "no token": (
        ONE,
        {"resumption": {"seed": 5, "token_ids": [[3, "4"]]}},
        "resumption.token_ids.0.1",
    ),
    "outside the vocabulary": (
        ONE,
        {"resumption": {"seed": 5, "token_ids": [[3, 512]]}},
        "resumption.token_ids",
    ),
    "too many tokens": (ONE, {"max_tokens": 1}, "resumption.token_ids"),
    "tokens after a stop token": (ONE, {"stop_token_ids": [3]}, "resumption.token_ids"),
    "tokens after a stop string": (ONE, {"stop": [" "]}, "resumption.token_ids"),
    "finished in the middle": (f"{ONE}f", {}, "resumption.token_ids"),
    "a stream without tokens": (ONE, {"return_token_ids": False}, "return_token_ids"),
}


@pytest.mark.parametrize(("event_id", "body", "field"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_resumption_is_refused_by_name(
    site: Site, event_id: str | None, body: dict[str, Any], field: str
) -> None:
    space = site.tokens(" ")[0]
    so_far = SO_FAR if "stop" not in body else SO_FAR | {"token_ids": [[space, 3]]}
    right = {"prompt": "x", "stream": True, "return_token_ids": True, "resumption": so_far}
    headers = {} if event_id is None else {"Last-Event-ID": event_id}
    response = await site.http.post("/v1/completions", json=right | body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert not site.scheduler.requests


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"request_id": "mine"}, "resumption.request_id"),
        ({"answers": []}, "resumption.token_ids"),
        ({"answers": [inference_pb2.AnswerSoFar(token_ids=[512])]}, "resumption.token_ids"),
        ({"answers": [inference_pb2.AnswerSoFar(is_finished=True)]}, "resumption.token_ids"),
        ({"seed": 8}, "resumption.seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
async def test_wrong_resumption_is_refused_over_grpc(
    site: Site, changed: dict[str, Any], field: str
) -> None:
    so_far = {
        "request_id": REQUEST_ID,
        "seed": 7,
        "answers": [inference_pb2.AnswerSoFar(token_ids=[3])],
    }
    request = inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(text="x"),
        options=generation_options(seed=7, return_token_ids=True),
        resumption=inference_pb2.Resumption(**{**so_far, **changed}),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.inference.stream(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    details = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(details)
    assert details.field_violations[0].field == field
    assert not site.scheduler.requests


async def test_the_official_client_reads_and_resumes_such_a_stream(site: Site) -> None:
    said = site.tokens("hi 世")
    site.scheduler.behaviour = says(*said, EOS)

    def talk() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            options: dict[str, Any] = {"model": "test-model", "prompt": "x", "stream": True}
            shows = {"return_token_ids": True}
            chunks = list(client.completions.create(**options, extra_body=shows))
            first = chunks[0].model_dump()
            request_id = first["id"].removeprefix("cmpl-")
            so_far = {"seed": first["seed"], "token_ids": [first["choices"][0]["token_ids"]]}
            rest = client.completions.create(
                **options,
                extra_body={**shows, "resumption": so_far},
                extra_headers={"Last-Event-ID": f"{request_id}:1"},
            )
            return (
                "".join(chunk.choices[0].text for chunk in chunks),
                chunks[0].choices[0].text + "".join(chunk.choices[0].text for chunk in rest),
            )

    assert await asyncio.to_thread(talk) == ("hi 世", "hi 世")


async def test_others_run_while_tokens_are_read_again(tmp_path: Path) -> None:
    said = [3] * 6400
    pipeline = scheduler_pb2.PipelineDescription()
    pipeline.CopyFrom(PIPELINE)
    pipeline.max_model_len = 10_000

    async with running(tmp_path, FakeScheduler(pipeline=pipeline)) as site:
        n_ticks = 0

        async def tick() -> None:
            nonlocal n_ticks
            while True:
                n_ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        response = await resume(
            site,
            "/v1/completions",
            {"prompt": "x", "stream": True, "return_token_ids": True, "max_tokens": len(said)},
            {
                "headers": {"Last-Event-ID": f"{REQUEST_ID}:{len(said)}"},
                "body": {"resumption": {"seed": 1, "token_ids": [said]}},
            },
        )
        ticking.cancel()
        assert chunk_of(frames(response)[0])["choices"][0]["finish_reason"] == "length"
    assert n_ticks >= len(said) / 64
