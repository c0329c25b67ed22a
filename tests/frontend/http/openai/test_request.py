"""Bodies of the OpenAI API: what is read, what is refused, and under which name."""

import json
from typing import Any

import pytest

from services.common import errors
from services.common.sampling import OPTIONS, SamplingParams
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, Conversation
from services.frontend.request.generation_request import MAX_ANSWERS, GenerationRequest

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> GenerationRequest:
    return parse_body(CompletionBody, json.dumps({"prompt": "x"} | fields).encode()).to_request()


def chat(**fields: Any) -> GenerationRequest:
    return parse_body(ChatBody, json.dumps({"messages": [USER]} | fields).encode()).to_request()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([], ()),
    ],
    ids=["text", "empty", "texts", "tokens", "lists", "nothing"],
)
def test_prompt_is_text_or_tokens_one_or_many(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [5, None, {}, [1, "a"], [True], [1.5], [[1], "a"], [[True]], [None], [[[1]]]],
    ids=str,
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("item", ["a", [1]], ids=["texts", "lists"])
def test_too_many_prompts_are_refused_before_they_are_read(item: Any) -> None:
    assert len(completion(prompt=[item] * MAX_ANSWERS).prompts) == MAX_ANSWERS
    body = json.dumps({"prompt": [item] * (MAX_ANSWERS + 1)}).encode()
    with pytest.raises(errors.InvalidRequest, match=f"at most {MAX_ANSWERS}") as caught:
        parse_body(CompletionBody, body)
    assert caught.value.field == "prompt"


def test_tokens_of_a_prompt_may_be_more_than_prompts() -> None:
    (prompt,) = completion(prompt=[7] * (MAX_ANSWERS + 1)).prompts
    assert prompt == (7,) * (MAX_ANSWERS + 1)


PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([USER] * (MAX_TURNS + 1), "messages"),
        ([{"role": "user", "content": [PART] * (MAX_TURNS + 1)}], "messages.0.content"),
    ],
    ids=["messages", "parts"],
)
def test_too_many_turns_and_parts_are_refused(messages: Any, field: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"at most {MAX_TURNS}") as caught:
        chat(messages=messages)
    assert caught.value.field == field


def test_many_turns_and_parts_are_taken() -> None:
    (conversation,) = chat(messages=[USER] * MAX_TURNS).prompts
    assert isinstance(conversation, Conversation)
    assert len(conversation.messages) == MAX_TURNS
    (conversation,) = chat(messages=[{"role": "user", "content": [PART] * MAX_TURNS}]).prompts
    assert isinstance(conversation, Conversation)
    assert (conversation.messages[0].content or "").count("a") == MAX_TURNS


def test_fields_reach_the_request() -> None:
    request = completion(
        model="m",
        max_tokens=3,
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=-1,
        frequency_penalty=0.75,
        repetition_penalty=1.5,
        seed=7,
        stop="s",
        stop_token_ids=[8],
        logit_bias={"5": -100, "3": 0.5},
        allowed_token_ids=[3, 5],
        bad_token_ids=[4],
        ignore_eos=True,
        return_token_ids=True,
        n=2,
    )
    options = request.options
    assert request.model == "m"
    assert (options.max_tokens, options.n, options.stop) == (3, 2, ("s",))
    assert options.sampling == SamplingParams(
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=-1,
        frequency_penalty=0.75,
        repetition_penalty=1.5,
        seed=7,
        stop_token_ids=(8,),
        logit_bias=((5, -100), (3, 0.5)),
        allowed_token_ids=(3, 5),
        bad_token_ids=(4,),
    )
    assert options.ignore_eos
    assert options.return_token_ids


def test_null_means_the_default() -> None:
    names = [
        "max_tokens", "n", "stop", "user", "stream", "return_tokens_as_token_ids",
        *(OPTIONS.keys() - {"seed", "grammar"})
    ]  # fmt: skip
    assert completion(seed=1, **dict.fromkeys(names)) == completion(seed=1)


def test_max_completion_tokens_limit_a_chat() -> None:
    options = chat(max_completion_tokens=5).options
    assert (options.max_tokens, options.max_tokens_field) == (5, "max_completion_tokens")
    assert chat(max_tokens=5, max_completion_tokens=5).options.max_tokens == 5


def test_messages_hold_text_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None}
    request = chat(messages=[{"role": "user", "content": parts, "name": "ann"}, said])
    assert request.prompts == (
        Conversation((ChatMessage("user", "a\nb", "ann"), ChatMessage("assistant", "c"))),
    )


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "user": "ann",
    "metadata": {"a": "b"},
}


@pytest.mark.parametrize(
    "fields",
    [
        NEUTRAL,
        {"best_of": None, "suffix": "", "logprobs": None, "echo": False},
    ],
    ids=["common", "completion"],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert completion(seed=1, **fields) == completion(seed=1)


def test_fields_that_change_nothing_are_accepted_in_a_chat() -> None:
    fields = {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    assert chat(seed=1, **NEUTRAL, **fields) == chat(seed=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", "0.5"),
        ("presence_penalty", True),
        ("repetition_penalty", [1.1]),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", dict.fromkeys(map(str, range(1025)), 1)),
        ("logit_bias", [[5, 1]]),
        ("allowed_token_ids", [1.5]),
        ("best_of", "2"),
        ("best_of", True),
        ("suffix", "end"),
        ("logprobs", True),
        ("prompt_logprobs", 1.5),
        ("stream_options", {"include_usage": True}),
        ("temperature", "1"),
        ("temperature", True),
        ("max_tokens", 1.5),
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("n", True),
        ("stream", 1),
        ("model", 5),
        ("stop", 5),
        ("stop_token_ids", [1.0, "2"]),
        ("ignore_eos", "yes"),
    ],
    ids=str,
)
def test_other_fields_and_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        completion(**{field: value})
    assert caught.value.field.partition(".")[0] == field


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ([5], "messages.0"),
        ([USER, {"content": "x"}], "messages.1.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "file"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{**USER, "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function"),
        ([{**USER, "function_call": {"arguments": "{}"}}], "messages.0.function_call.name"),
        ([{**USER, "audio": {"id": "1"}}], "messages.0.audio"),
    ],
    ids=str,
)
def test_wrong_messages_are_named_by_their_path(messages: Any, field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.field == field


def test_notes_stand_in_the_place_of_pictures() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": content}, {"role": "tool", "content": content[:1]}]
    told: list[tuple[str, ...]] = []
    data = json.dumps({"messages": messages}).encode()
    [conversation] = parse_body(ChatBody, data, told.append).prompts
    assert isinstance(conversation, Conversation)
    assert [turn.content for turn in conversation.messages] == [
        "[image left out]\na",
        "[image left out]",
    ]
    assert told == [("messages.content.image_url",)]


@pytest.mark.parametrize(
    ("part", "role", "text"),
    [
        ({"type": "thinking", "thinking": "Hm.", "signature": "s"}, "assistant", ""),
        ({"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "assistant", ""),
        ({"type": "reasoning", "text": "Hm."}, "assistant", ""),
        ({"type": "redacted_thinking", "data": "x"}, "assistant", ""),
        ({"type": "file", "file": {"file_data": "data:"}}, "tool", "[file left out]\n"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "tool", "[input_audio left out]\n"),
        ({"type": "resource", "resource": {"text": "t"}}, "function", "[resource left out]\n"),
    ],
    ids=str,
)
def test_what_models_and_tools_wrote_never_locks_a_conversation(
    part: dict[str, Any], role: str, text: str
) -> None:
    said = {"role": role, "content": [part, {"type": "text", "text": "a"}]}
    messages = [USER, said]
    told: list[tuple[str, ...]] = []
    data = json.dumps({"messages": messages}).encode()
    [conversation] = parse_body(ChatBody, data, told.append).prompts
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1].content == f"{text}a"
    assert told == [(f"messages.content.{part['type']}",)]
    with pytest.raises(errors.InvalidRequest, match="is not supported"):
        chat(messages=[{**said, "role": "user"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}},
        {"logprobs": 1},
        {"top_logprobs": 1},
        {"prompt_logprobs": 1, "stream": True},
        {"max_tokens": 1, "max_completion_tokens": 2},
    ],
    ids=str,
)
def test_chat_fields_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.field == next(iter(fields))


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody], ids=["completion", "chat"])
def test_missing_prompt_is_named(kind: type[CompletionBody] | type[ChatBody]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_body(kind, b"{}")
    assert caught.value.field == ("prompt" if kind is CompletionBody else "messages")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"prompt"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
    ],
    ids=str,
)
def test_body_that_is_no_object_in_utf8_is_refused(data: bytes) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_body(CompletionBody, data)
    assert caught.value.field == "body"


def test_names_of_any_length_make_short_errors() -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_body(CompletionBody, json.dumps({"x" * 10_000: 1}).encode())
    assert len(caught.value.message) < 200
