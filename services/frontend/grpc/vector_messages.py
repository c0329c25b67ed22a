"""Turns the messages of `Embed` and `Score` into `GenerationRequest`, which the gRPC API shares
with the HTTP API."""

from orcinus.v1 import inference_pb2

from services.common import errors
from services.frontend.generation.vector_requests import (
    check_number,
    embedding_request,
    score_request,
    vector_options,
)
from services.frontend.generation.vectors import FLOAT_BYTES
from services.frontend.grpc.requests import check_known, to_prompt
from services.frontend.request.generation_request import GenerationRequest, Prompt
from services.frontend.request.texts_field import TextsField
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.text.pair_format import PairFormat

FIELD_BYTES = 12
"""Largest number of bytes that the tags and lengths around a vector take in a message."""


def to_embedding_request(
    message: inference_pb2.EmbedRequest, defaults: VectorDefaults
) -> GenerationRequest:
    """Returns the request for vectors that a message describes. `defaults` has the checkpoint's
    named prompts, one of which may be put before each text.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong.
    """
    check_known("request", message)
    name = message.prompt_name if message.HasField("prompt_name") else None
    adds = message.add_special_tokens if message.HasField("add_special_tokens") else None
    return embedding_request(
        [_to_input(index, prompt) for index, prompt in enumerate(message.inputs)],
        vector_options(
            add_special_tokens=adds,
            priority=message.priority,
            cache_salt=message.cache_salt,
            truncate_prompt_tokens=_truncation(message),
        ),
        defaults=defaults,
        prompt_name=name,
        model=message.model,
        field=TextsField("inputs"),
    )


def to_score_request(message: inference_pb2.ScoreRequest, format: PairFormat) -> GenerationRequest:
    """Returns the request for scores that a message describes. `format` makes a prompt of each pair
    of texts.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong.
    """
    check_known("request", message)
    check_number("pairs", len(message.pairs))
    for index, pair in enumerate(message.pairs):
        check_known(f"pairs[{index}]", pair)
        if not (pair.first and pair.second):
            raise errors.InvalidRequest(f"pairs[{index}]", "must not be empty")
    return score_request(
        [(pair.first, pair.second) for pair in message.pairs],
        vector_options(
            wants_score=True,
            priority=message.priority,
            cache_salt=message.cache_salt,
            truncate_prompt_tokens=_truncation(message),
        ),
        format=format,
        instruction=message.instruction if message.HasField("instruction") else None,
        model=message.model,
        field=TextsField("pairs"),
    )


def vector_message_bytes(n_values: int) -> int:
    """Returns the number of bytes that a vector of `n_values` elements takes in a message."""
    return FLOAT_BYTES * n_values + FIELD_BYTES


def _truncation(message: inference_pb2.EmbedRequest | inference_pb2.ScoreRequest) -> int | None:
    has_it = message.HasField("truncate_prompt_tokens")
    return message.truncate_prompt_tokens if has_it else None


def _to_input(index: int, prompt: inference_pb2.Prompt) -> Prompt:
    field = f"inputs[{index}]"
    check_known(field, prompt)
    if prompt.HasField("conversation"):
        raise errors.InvalidRequest(field, "must be a text or tokens, and no conversation")
    try:
        return to_prompt(prompt)
    except errors.InvalidRequest as error:
        raise error.renamed(field) from None
