"""Fields are counted as a parser would make them, whatever the bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import inference_pb2

from services.frontend.grpc.field_count import has_more_fields

REQUEST = inference_pb2.GenerateRequest


def conversation(n_turns: int) -> inference_pb2.GenerateRequest:
    turns = [inference_pb2.ChatMessage(role="user", content="x")] * n_turns
    return REQUEST(
        prompt=inference_pb2.Prompt(conversation=inference_pb2.Conversation(messages=turns))
    )


@pytest.mark.parametrize("n_turns", [0, 1, 7])
def test_fields_of_messages_in_messages_count(n_turns: int) -> None:
    n_fields = 2 + 3 * n_turns  # the prompt, the conversation; each turn and what it has
    data = conversation(n_turns).SerializeToString()
    assert not has_more_fields(data, REQUEST, n_fields)
    assert has_more_fields(data, REQUEST, n_fields - 1)


def test_packed_numbers_and_long_texts_are_one_field() -> None:
    numbers = inference_pb2.TokenIds(ids=range(100_000))
    for prompt in (
        inference_pb2.Prompt(token_ids=numbers),
        inference_pb2.Prompt(text="\x0a\x00" * 100_000),
    ):
        assert not has_more_fields(REQUEST(prompt=prompt).SerializeToString(), REQUEST, 3)


@pytest.mark.parametrize(
    "field",
    [b"\xf8\x06\x00", b"\xfa\x06\x00", b"\xfb\x06\xfc\x06", b"\x0a\x00"],
    ids=["unknown number", "unknown text", "group", "empty prompt"],
)
def test_fields_that_become_much_from_little_count(field: bytes) -> None:
    assert not has_more_fields(field * 10, REQUEST, 20)
    assert has_more_fields(field * 30, REQUEST, 20)


@given(data=st.binary(max_size=200), limit=st.integers(0, 300))
def test_any_bytes_have_a_number_of_fields(data: bytes, limit: int) -> None:
    assert has_more_fields(data, REQUEST, limit) in (False, True)
    assert not has_more_fields(data, REQUEST, len(data))
