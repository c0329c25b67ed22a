"""A list of a million wrong items makes one error, in whichever field it comes."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from services.common.errors import InvalidRequest
from services.frontend.http.anthropic.request import CountBody, MessagesBody
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.http.openai.tokens import DetokenizeBody, TokenizeBody
from services.frontend.http.responses.request import ResponsesBody

BODIES = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
    TokenizeBody,
    DetokenizeBody,
)

CHECKED_BEFORE = ("modalities",)
"""Fields whose values are refused before their items are looked at."""


NOT_READ = ("metadata", "serialization", "json_schema_input_schema")
"""Parts of a schema of which no value is read."""


def unguarded(schema: object, place: str) -> Iterator[str]:
    """Yields the places of lists that go on after their first wrong item."""
    if isinstance(schema, dict):
        place = f"{place}.{schema['ref'].split(':')[0]}" if "ref" in schema else place
        if schema.get("type") == "list" and not schema.get("fail_fast"):
            items: Any = schema.get("items_schema", {"type": "any"})
            if items["type"] != "any":
                yield place
        is_fields = not isinstance(schema.get("type"), str)
        for name, part in schema.items():
            if name not in (CHECKED_BEFORE if is_fields else NOT_READ):
                yield from unguarded(part, f"{place}.{name}")
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from unguarded(part, place)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_list_ends_at_its_first_wrong_item(kind: type[BaseModel]) -> None:
    assert list(unguarded(kind.__pydantic_core_schema__, kind.__name__)) == []


@pytest.mark.parametrize("field", CHECKED_BEFORE)
def test_lists_that_only_say_what_is_served_are_not_looked_into(field: str) -> None:
    content = f'{{"messages": [], "{field}": [{"1," * 100_000}1]}}'
    with pytest.raises(InvalidRequest, match="not supported yet"):
        parse_body(ChatBody, content.encode())
