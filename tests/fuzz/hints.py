"""Values of fields with which an input gets further than the first check."""

from collections.abc import Sequence
from typing import Any

from tests.fuzz.choices import Choices
from tests.fuzz.messages import Hint, Hints
from tests.system.conftest import VOCAB_SIZE

Metadata = list[tuple[str, str | bytes]]


def _number(low: int, high: int) -> Hint:
    return lambda choices: low + choices.below(high - low + 1)


def _fraction(low: float, high: float) -> Hint:
    return lambda choices: low + (high - low) * choices.below(65) / 64


def _one_of(*items: Any) -> Hint:
    return lambda choices: choices.one_of(items)


def _fields(message: str, **hints: Hint) -> Hints:
    return {f"{message}.{name}": hint for name, hint in hints.items()}


_TOKEN = _number(0, VOCAB_SIZE - 1)
_REQUEST_ID = _one_of("a", "b", "c", "0123456789abcdef" * 2)
_EPOCH = _number(1, 4)

_SAMPLING = _fields(
    "orcinus.v1.SamplingParams",
    temperature=_fraction(0, 2),
    top_k=_number(-1, 50),
    top_p=_fraction(0.125, 1),
    min_p=_fraction(0, 1),
    min_tokens=_number(0, 4),
    presence_penalty=_fraction(-2, 2),
    frequency_penalty=_fraction(-2, 2),
    repetition_penalty=_fraction(0.125, 8),
    stop_token_ids=_TOKEN,
)

_MODEL = _one_of("", "model")

INFERENCE: Hints = {
    **_SAMPLING,
    **_fields("orcinus.v1.GenerateRequest", model=_MODEL, prompt=_MODEL),
    **_fields("orcinus.v1.GenerateStreamRequest", model=_MODEL, prompt=_MODEL),
    **_fields(
        "orcinus.v1.GenerationOptions",
        max_tokens=_number(1, 20),
        n=_number(1, 3),
        stop=lambda choices: choices.text(3),
    ),
    **_fields("orcinus.v1.TokenIds", ids=_TOKEN),
    **_fields("orcinus.v1.ChatMessage", role=_one_of("user", "system", "assistant", "tool")),
    **_fields(
        "orcinus.v1.Conversation", chat_template_kwargs=_one_of("", '{"a": [1]}', "[]", "[" * 99)
    ),
    **_fields(
        "orcinus.v1.Tool", name=_one_of("a", "b"), parameters=_one_of("", '{"type": "object"}')
    ),
    **_fields("orcinus.v1.ToolChoice", name=_one_of("a", "b")),
    **_fields("orcinus.v1.DetokenizeRequest", tokens=_TOKEN),
    **_fields("orcinus.v1.AnswerSoFar", token_ids=_TOKEN),
    **_fields("orcinus.v1.Resumption", request_id=_REQUEST_ID),
    **_fields(
        "grpc.health.v1.HealthCheckRequest",
        service=_one_of("", "liveness", "orcinus.v1.InferenceService", "nothing"),
    ),
    **_fields(
        "grpc.reflection.v1.ServerReflectionRequest",
        file_containing_symbol=_one_of("orcinus.v1.InferenceService", "orcinus.v1.Prompt", "x"),
    ),
    **_fields(
        "grpc.reflection.v1alpha.ServerReflectionRequest",
        file_containing_symbol=_one_of("orcinus.v1.InferenceService", "orcinus.v1.Prompt", "x"),
    ),
}

SCHEDULER: Hints = {
    **_SAMPLING,
    **_fields(
        "orcinus.v1.Submission",
        request_id=_REQUEST_ID,
        prompt_token_ids=_TOKEN,
        generated_token_ids=_TOKEN,
        max_new_tokens=_number(1, 20),
        sampling=_TOKEN,
    ),
    **_fields("orcinus.v1.Cancellation", request_id=_REQUEST_ID),
}

WORKER: Hints = {
    **_fields(
        "orcinus.v1.AssignStageRequest", epoch=_EPOCH, stage_index=_number(0, 1), n_stages=_EPOCH
    ),
    **_fields("orcinus.v1.JoinPipelineRequest", epoch=_EPOCH, stage_index=_number(0, 2)),
    **_fields("orcinus.v1.RunIterationsRequest", epoch=_EPOCH),
    **_fields("orcinus.v1.ProfileRequest", n_iterations=_number(0, 101), tp_rank=_number(0, 1)),
}

_KEYS = ("authorization", "traceparent", "tracestate", "baggage", "orcinus-epoch", "x-any")
_VALUES = (
    "Bearer x",
    "",
    "Bearer ",
    "Basic Og==",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "00-ffffffffffffffffffffffffffffffff-ffffffffffffffff-ff",
    "1",
    "-1",
    "18446744073709551616",
    "x" * 4000,
)


def headers(choices: Choices, keys: Sequence[str] = _KEYS) -> list[tuple[str, str]]:
    """Returns a few headers, or entries of metadata."""
    return choices.several(3, lambda: (choices.one_of(keys), header_value(choices)))


def header_value(choices: Choices) -> str:
    """Returns a header value that the server interprets, or any ASCII text."""
    if choices.below(2):
        return choices.one_of(_VALUES)
    return "".join(chr(0x21 + byte % 94) for byte in choices.take(choices.below(20)))


def metadata(choices: Choices) -> Metadata:
    """Returns metadata of a call."""
    entries: Metadata = [*headers(choices)]
    if choices.one_in(8):
        entries.append(("x-any-bin", choices.take(choices.below(30))))
    return entries
