"""Which texts the grammar engine accepts, with a token for each byte."""

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import AdditionalProperties, ClientSchema

BYTES = LLTokenizer("byte")


class CannotCompile(Exception):
    """No text can follow the grammar."""


def client_schema(schema: Any, additional: AdditionalProperties = "declared") -> ClientSchema:
    return ClientSchema(schema, "asked", additional_properties=additional)


def accepts(schema: ClientSchema, text: str) -> bool:
    """Returns whether a text is one that the grammar of a schema allows."""
    return follows(output_format.json_schema(schema), text)


def follows(grammar: str, text: str) -> bool:
    """Returns whether a text is one that a grammar allows."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    if matcher.is_error():
        raise CannotCompile(matcher.get_error())
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def unenforced(schema: ClientSchema) -> list[str]:
    """Returns the places of the keywords that are not enforced."""
    return [".".join((*one.path, one.keyword)) for one in schema.unenforced]
