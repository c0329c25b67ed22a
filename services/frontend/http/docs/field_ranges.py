"""The ranges of fields, for the OpenAPI document.

Options of sampling, counts and formats are checked in one place for all protocols, and not by the
models of bodies. Their limits are added to the schemas that the models make.
"""

from pydantic.json_schema import JsonSchemaValue

from services.common.priority import PRIORITIES
from services.common.sampling import (
    MAX_GRAMMAR_LENGTH,
    MAX_LOGPROBS,
    OPTIONS,
    Numbers,
    Option,
    TokenBiases,
    TokenLists,
    WholeNumbers,
)
from services.frontend.http.docs.components import reference
from services.frontend.http.openai.output_format_fields import OutputFormatFields
from services.frontend.http.openai.request import TOKEN_NAME
from services.frontend.http.transport.media_types import JSON
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    MAX_N,
    MAX_SALT_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
)
from services.frontend.request.output_format import MAX_CHOICES

_FORMAT = (
    "Format of the output. A request has one at most, in one of the fields for it, which becomes a "
    f"grammar of at most {MAX_GRAMMAR_LENGTH} characters that the model must be able to follow."
)


Schemas = dict[str, JsonSchemaValue]
"""Schemas by their names."""

Properties = dict[str, JsonSchemaValue]
"""The schemas of a body's fields by the fields' names."""


def add_ranges(schemas: Schemas) -> None:
    """Adds to the schemas of bodies what their models do not check."""
    for body in ("CompletionBody", "ChatBody", "TokenizeBody"):
        _add_numbers(schemas[body]["properties"])
        _add_formats(schemas[body]["properties"])
    _add_formats(schemas["StructuredOutputs"]["properties"])
    for body in ("ResponsesBody", "MessagesBody"):
        _add_numbers(schemas[body]["properties"])
    schemas.pop("StopTexts", None)  # `stop` has branches of its own
    schemas["CompletionBody"]["properties"]["prompt"] = _prompt()
    schemas["TokenIds"]["items"]["minimum"] = 0
    schemas["Choices"] |= {"minItems": 1, "maxItems": MAX_CHOICES}
    schemas["Choices"]["items"]["minLength"] = 1
    schemas["ResumptionBody"]["properties"]["seed"] |= _bounds(OPTIONS["seed"])


def _add_numbers(properties: Properties) -> None:
    """Adds the ranges of numbers, and the lengths of lists and texts."""
    ranges = {name: _bounds(option) for name, option in OPTIONS.items() if name in properties}
    ranges["n"] = ranges["best_of"] = {"minimum": 1, "maximum": MAX_N}
    # In a conversation `logprobs` is a boolean, and alternatives have a field of their own.
    counts = {"prompt_logprobs", "top_logprobs" if "top_logprobs" in properties else "logprobs"}
    ranges |= {name: {"minimum": 0, "maximum": MAX_LOGPROBS} for name in counts}
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    ranges |= dict.fromkeys(limits, _range(MAX_TOKENS))
    ranges["priority"] = _range(PRIORITIES)
    ranges["cache_salt"] = {"maxLength": MAX_SALT_LENGTH}
    for name, allowed in ranges.items():
        if name in properties:
            first, *_ = properties[name].get("anyOf", [properties[name]])
            first |= allowed
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    texts = {"type": "array", "items": text, "maxItems": MAX_STOPS}
    stops = {"stop": [text, texts, {"type": "null"}], "stop_sequences": [texts, {"type": "null"}]}
    for name in stops.keys() & properties.keys():
        properties[name]["anyOf"] = stops[name]


def _add_formats(properties: Properties) -> None:
    """Adds what is checked of formats where grammars are made of them."""
    for name in properties.keys() & OutputFormatFields.model_fields.keys():
        properties[name]["description"] = _FORMAT
    for name, branch in (
        (name, branch) for name, schema in properties.items() for branch in schema.get("anyOf", ())
    ):
        match name.removeprefix("guided_"), branch.get("type"):
            case "json" | "json_schema", "string":
                branch |= {"contentMediaType": JSON, "pattern": r"^[ \t\r\n]*\{"}
            case "grammar" | "ebnf", "string":
                branch |= {"minLength": 1}


def _bounds(option: Option) -> JsonSchemaValue:
    match option.allowed:
        case TokenLists(max_length):
            return {"maxItems": max_length}
        case TokenBiases(max_length, low, high):
            return {
                "type": "object",
                "propertyNames": {"pattern": TOKEN_NAME},
                "additionalProperties": {"type": "number", "minimum": low, "maximum": high},
                "maxProperties": max_length,
            }
        case Numbers() | WholeNumbers() as allowed:
            return _range(allowed)
        case _:
            return {}


def _range(allowed: Numbers | WholeNumbers) -> JsonSchemaValue:
    match allowed:
        case Numbers(low, high, excludes_low=True):
            return {"exclusiveMinimum": low, "maximum": high}
        case _:
            return {"minimum": allowed.low, "maximum": allowed.high}


def _prompt() -> JsonSchemaValue:
    tokens = {**reference("schemas", "TokenIds"), "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS}
    text = {"type": "string"}
    return {
        "title": "Prompt",
        "anyOf": [text, {**several, "items": text}, tokens, {**several, "items": tokens}],
    }
