"""The gRPC API over a real channel: answers, errors with details, deadlines, cancellation."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from orcinus.v1 import inference_pb2, scheduler_pb2

from tests.fake_scheduler import (
    PIPELINE,
    keeps_quiet,
    loses_pipeline_after,
    rejects,
    says,
)
from tests.frontend import checkpoints
from tests.frontend.conftest import Site
from tests.generation_options import generation_options
from tests.limits import HANG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = PIPELINE.eos_token_ids[0]
AN_OBJECT = inference_pb2.OutputFormat(json_object=True)


def text(prompt: str) -> inference_pb2.Prompt:
    return inference_pb2.Prompt(text=prompt)


def tokens(*token_ids: int) -> inference_pb2.Prompt:
    return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=token_ids))


def conversation(*contents: str) -> inference_pb2.Prompt:
    messages = [inference_pb2.ChatMessage(role="user", content=content) for content in contents]
    return inference_pb2.Prompt(conversation=inference_pb2.Conversation(messages=messages))


def whole(prompt: inference_pb2.Prompt | None, **options: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=prompt, options=generation_options(**options))


def streamed(prompt: inference_pb2.Prompt, **options: Any) -> inference_pb2.GenerateStreamRequest:
    return inference_pb2.GenerateStreamRequest(prompt=prompt, options=generation_options(**options))


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def detail(error: Any, kind: Any) -> Any:
    """The one detail of a status, unpacked."""
    (packed,) = rpc_status.from_call(error).details
    message = kind()
    assert packed.Unpack(message)
    return message


async def test_generate_answers(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens(" wörld"), EOS)
    answer = await site.inference.generate(whole(text("hello"), return_token_ids=True))
    assert answer.model == "test-model"
    assert answer.request_id
    (choice,) = answer.choices
    assert choice.text == " wörld"
    assert choice.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert list(choice.token_ids) == [*site.tokens(" wörld"), EOS]
    assert list(answer.prompt_token_ids) == list(site.prompt_tokens("hello"))
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == len(choice.token_ids)


async def test_token_ids_stay_home_unless_wanted(site: Site) -> None:
    answer = await site.inference.generate(whole(text("hello")))
    assert not answer.prompt_token_ids
    assert not answer.choices[0].token_ids


async def test_stream_ends_with_the_usage(site: Site) -> None:
    site.scheduler.behaviour = says(*site.tokens("世a"))
    messages = [
        message
        async for message in site.inference.stream(
            streamed(tokens(5, 6), return_token_ids=True, max_tokens=4)
        )
    ]
    *pieces, last = messages
    assert list(pieces[0].prompt_token_ids) == [5, 6]
    assert not any(piece.prompt_token_ids for piece in pieces[1:])
    assert "".join(piece.choice.text for piece in pieces) == "世a"
    assert [token for piece in pieces for token in piece.choice.token_ids] == list(
        site.tokens("世a")
    )
    assert pieces[-1].choice.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert not last.HasField("choice")
    assert last.usage.prompt_tokens == 2
    assert last.usage.completion_tokens == len(site.tokens("世a"))


async def test_answers_of_a_stream_are_numbered(site: Site) -> None:
    texts = {0: "", 1: ""}
    async for message in site.inference.stream(streamed(text("ab"), n=2, max_tokens=3)):
        if message.HasField("choice"):
            texts[message.choice.index] += message.choice.text
    assert texts == {0: "ab", 1: "ab"}


async def test_conversation_is_written_with_the_template(site: Site) -> None:
    await site.inference.generate(whole(conversation("hello"), max_tokens=1))
    prompt = site.scheduler.requests[0].submission.prompt_token_ids
    assert list(prompt) == [*site.prompt_tokens(""), *site.tokens("[user] hello\n[assistant] ")]


@pytest.mark.parametrize("kind", ["text", "token_ids", "conversation"])
async def test_tokenize_gives_the_tokens_that_generate_uses(site: Site, kind: str) -> None:
    prompt = {"text": text("hello"), "token_ids": tokens(5, 6), "conversation": conversation("a")}
    tokenized = await site.inference.tokenize(inference_pb2.TokenizeRequest(prompt=prompt[kind]))
    await site.inference.generate(whole(prompt[kind], max_tokens=1))
    used = site.scheduler.requests[0].submission.prompt_token_ids
    assert list(tokenized.token_ids) == list(used)


def several(*prompts: inference_pb2.Prompt, **options: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompts=prompts, options=generation_options(**options))


async def test_each_of_several_prompts_is_answered(site: Site) -> None:
    request = several(text("ab"), tokens(5, 6, 7), n=2, max_tokens=2, return_token_ids=True)
    answer = await site.inference.generate(request)
    prompts = [list(site.prompt_tokens("ab")), [5, 6, 7]]
    assert [list(prompt.ids) for prompt in answer.prompts_token_ids] == prompts
    assert not answer.prompt_token_ids
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    shown = [list(choice.token_ids) for choice in answer.choices]
    assert shown == [prompts[0][:2], prompts[0][:2], [5, 6], [5, 6]]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 8


async def test_a_stream_of_several_prompts_shows_their_tokens_once(site: Site) -> None:
    options = generation_options(max_tokens=2, return_token_ids=True)
    request = inference_pb2.GenerateStreamRequest(
        prompts=[tokens(5, 6), tokens(7)], options=options
    )
    first, *others = [message async for message in site.inference.stream(request)]
    assert [list(prompt.ids) for prompt in first.prompts_token_ids] == [[5, 6], [7]]
    assert not any(message.prompts_token_ids for message in others)
    assert {message.choice.index for message in (first, *others)} == {0, 1}


async def test_a_prompt_with_too_many_tokens_is_refused_among_several(site: Site) -> None:
    error = await failure(site.inference.generate(several(text("x"), tokens(*[5] * 129))))
    (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "prompt"
    assert not site.scheduler.requests


async def test_an_echo_begins_with_the_prompt(site: Site) -> None:
    request = several(text("ab"), tokens(*site.tokens("世")), echo=True, max_tokens=1)
    answer = await site.inference.generate(request)
    first, second = (choice.text for choice in answer.choices)
    assert first.startswith("ab")
    assert second.startswith("世")
    assert answer.usage.completion_tokens == 2


async def test_tokens_become_text(site: Site) -> None:
    token_ids = [*site.tokens("hello 世界"), EOS]
    answer = await site.inference.detokenize(inference_pb2.DetokenizeRequest(tokens=token_ids))
    assert answer.text == f"hello 世界{checkpoints.EOS}"
    assert not (await site.inference.detokenize(inference_pb2.DetokenizeRequest())).text


@pytest.mark.parametrize("token_ids", [[512], [5] * 129], ids=["unknown", "too many"])
async def test_tokens_that_are_none_become_no_text(site: Site, token_ids: list[int]) -> None:
    request = inference_pb2.DetokenizeRequest(tokens=token_ids)
    error = await failure(site.inference.detokenize(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "tokens"


async def test_model_is_described(site: Site) -> None:
    model = await site.inference.describe_model()
    assert model == inference_pb2.DescribeModelResponse(
        model="test-model",
        max_model_len=128,
        vocab_size=512,
        eos_token_ids=[EOS],
        n_stages=2,
        tp_size=1,
        has_chat_template=True,
    )


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (whole(None), "prompt"),
        (whole(text("x"), max_tokens=-1), "max_tokens"),
        (whole(text("x"), temperature=float("nan")), "temperature"),
        (whole(text("x"), presence_penalty=-2.5), "presence_penalty"),
        (whole(text("x"), frequency_penalty=2.5), "frequency_penalty"),
        (whole(text("x"), repetition_penalty=9), "repetition_penalty"),
        (whole(text("x"), n=0), "n"),
        (whole(text("x"), stop=[""]), "stop"),
        (whole(text("x"), stop_token_ids=[-1]), "stop_token_ids"),
        (whole(tokens()), "prompt"),
        (whole(tokens(512)), "prompt"),
        (whole(conversation()), "messages"),
        (inference_pb2.GenerateRequest(model="gpt-5", prompt=text("x")), "model"),
        (whole(text("x"), format=inference_pb2.OutputFormat()), "format"),
        (whole(text("x"), format=inference_pb2.OutputFormat(json_object=False)), "format"),
        (whole(text("x"), format=AN_OBJECT, grammar="start: /a/"), "format"),
        (whole(text("x"), grammar="start: (/a/"), "grammar"),
        (whole(text("x"), format=AN_OBJECT, ignore_eos=True), "ignore_eos"),
        (whole(text("x"), format=AN_OBJECT, min_tokens=1), "min_tokens"),
        (b"\x12\x03\x0a\x01\xff", "request"),
        # `temperature` where it was before it moved into `sampling`, and an option of the future.
        (b"\x12\x03\x0a\x01x\x1a\x05\x1d\x00\x00\x80\x3f", "options"),
        (b"\x12\x03\x0a\x01x\x1a\x06\x82\x01\x03\xf8\x06\x01", "options.sampling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
async def test_wrong_request_is_refused_by_name(site: Site, request_: Any, field: str) -> None:
    error = await failure(site.inference.generate(request_))
    is_unknown = field == "model"
    assert error.code() is grpc.StatusCode[("INVALID_ARGUMENT", "NOT_FOUND")[is_unknown]]
    (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == field
    assert not site.scheduler.requests


async def test_request_that_is_too_large_is_refused(site: Site) -> None:
    request = whole(text("x" * 200_000))
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        error = await failure(site.inference.generate(request, compression=compression))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in error.details()
    assert not site.scheduler.requests


async def test_a_grammar_may_be_given_among_the_sampling_options(site: Site) -> None:
    site.scheduler.behaviour = says(EOS)
    await site.inference.generate(whole(text("x"), grammar="start: /a/"))
    (request,) = site.scheduler.requests
    assert request.submission.sampling.grammar == "start: /a/"


async def test_wrong_request_for_a_stream_is_refused_too(site: Site) -> None:
    error = await failure(site.inference.stream(streamed(text("x"), top_p=2.0)).read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_full_pool_says_when_to_try_again(site: Site) -> None:
    site.scheduler.behaviour = rejects(
        scheduler_pb2.REJECTION_REASON_POOL_FULL, "full", retry_after_s=2.5
    )
    error = await failure(site.inference.generate(whole(text("x"))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500


async def test_lost_pipeline_is_unavailable(site: Site) -> None:
    site.scheduler.behaviour = loses_pipeline_after(*site.tokens("ab"))
    error = await failure(site.inference.generate(whole(text("x"))))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    call = site.inference.stream(streamed(text("x")))
    assert [(await call.read()).choice.text for _ in "ab"] == ["a", "b"]
    assert (await failure(call.read())).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_deadline_ends_the_call_and_the_request(site: Site, is_stream: bool) -> None:
    site.scheduler.behaviour = keeps_quiet
    if is_stream:
        call = site.inference.stream(streamed(text("x")), timeout=0.5).read()
    else:
        call = site.inference.generate(whole(text("x")), timeout=0.5)
    error = await failure(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(HANG_S):
        (request,) = await site.scheduler.wait_requests()
        await request.cancelled.wait()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_client_that_cancels_ends_the_request(site: Site, is_stream: bool) -> None:
    site.scheduler.behaviour = keeps_quiet
    call = (
        site.inference.stream(streamed(text("x")))
        if is_stream
        else site.inference.generate(whole(text("x")))
    )
    async with asyncio.timeout(HANG_S):
        (request,) = await site.scheduler.wait_requests()
        call.cancel()
        await request.cancelled.wait()


async def test_health_is_serving(site: Site) -> None:
    stub = health_pb2_grpc.HealthStub(site.inference.channel)
    for name in ("", "orcinus.v1.InferenceService"):
        status = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert status.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_services_are_described_by_reflection(site: Site, version: str) -> None:
    ask = site.inference.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call: Any = ask(timeout=HANG_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {item.name for item in (await call.read()).list_services_response.service}
    assert listed == {
        "orcinus.v1.InferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for name in listed:  # a tool asks for the file of each service that it lists
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        data = (await call.read()).file_descriptor_response.file_descriptor_proto
        files = map(descriptor_pb2.FileDescriptorProto.FromString, data)
        assert name in {f"{file.package}.{it.name}" for file in files for it in file.service}
    await call.done_writing()
