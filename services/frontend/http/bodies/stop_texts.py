"""Types of the fields of a body for stop texts (texts that end an answer), and for banned texts."""

from typing import Annotated

from pydantic import BeforeValidator, FailFast
from typing_extensions import TypeAliasType

from services.frontend.http.bodies.ranges import Within
from services.frontend.request.generation_request import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)

StopText = Annotated[str, Within({"minLength": 1, "maxLength": MAX_STOP_LENGTH})]

StopTexts = TypeAliasType(
    "StopTexts", Annotated[list[StopText], FailFast(), Within({"maxItems": MAX_STOPS})]
)
"""A list of stop texts."""


BadWords = TypeAliasType(
    "BadWords",
    Annotated[
        list[Annotated[str, Within({"minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH})]],
        FailFast(),
        Within({"maxItems": MAX_BAD_WORDS}),
    ],
)
"""A list of texts that are never generated."""


def _as_list(value: object) -> object:
    if not isinstance(value, str | list | None):
        raise ValueError("must be a text or a list of texts")
    return [value] if isinstance(value, str) else value


StopTextOrTexts = Annotated[
    StopTexts | None, BeforeValidator(_as_list, json_schema_input_type=StopText | StopTexts | None)
]
"""A stop text, or a list of stop texts."""
