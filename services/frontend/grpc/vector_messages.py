"""Turns the messages of `Embed` and `Score` into the requests that both protocols share."""

from orcinus.v1 import inference_pb2

from services.common import errors
from services.frontend.generation.vector_requests import (
    embedding_request,
    score_request,
    vector_options,
)
from services.frontend.grpc.requests import check_known, to_prompt
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.text.pair_format import PairFormat


def to_embedding_request(
    message: inference_pb2.EmbedRequest, defaults: VectorDefaults
) -> GenerationRequest:
    """Returns the request for vectors that a message describes. `defaults` has the prompts that may
    go before texts.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong.
    """
    check_known("request", message)
    _check_number("inputs", len(message.inputs))
    name = message.prompt_name if message.HasField("prompt_name") else None
    adds = message.add_special_tokens if message.HasField("add_special_tokens") else None
    return embedding_request(
        [_to_input(index, prompt) for index, prompt in enumerate(message.inputs)],
        vector_options(
            add_special_tokens=adds, priority=message.priority, cache_salt=message.cache_salt
        ),
        before=defaults.text_before(name),
        model=message.model,
        field="inputs",
    )


def to_score_request(message: inference_pb2.ScoreRequest, format: PairFormat) -> GenerationRequest:
    """Returns the request for scores that a message describes. `format` makes the prompts.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong.
    """
    check_known("request", message)
    _check_number("pairs", len(message.pairs))
    for index, pair in enumerate(message.pairs):
        if not pair.first:
            raise errors.InvalidRequest(f"pairs[{index}]", "must not be empty")
    return score_request(
        [(pair.first, pair.second) for pair in message.pairs],
        vector_options(priority=message.priority, cache_salt=message.cache_salt),
        format=format,
        instruction=message.instruction if message.HasField("instruction") else None,
        model=message.model,
        field="pairs",
    )


def _to_input(index: int, prompt: inference_pb2.Prompt) -> Prompt:
    field = f"inputs[{index}]"
    if prompt.HasField("conversation"):
        raise errors.InvalidRequest(field, "must be a text or tokens, and no conversation")
    try:
        return to_prompt(prompt)
    except errors.InvalidRequest as error:
        raise error.renamed(field) from None


def _check_number(field: str, n_items: int) -> None:
    if n_items > MAX_ANSWERS:
        raise errors.InvalidRequest(field, f"has {n_items} items; at most {MAX_ANSWERS} may be")
