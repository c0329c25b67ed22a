"""Fields of a body with which clients ask for a format of the output, in the spellings of several
servers.

    response_format               OpenAI: text, json_object, json_schema
    structured_outputs            vLLM: one of json, json_object, regex, choice, grammar
    guided_json, guided_regex, …  older versions of vLLM
    json_schema, regex, ebnf      SGLang

A request may use only one of these fields.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Tag
from pydantic import Field as BodyField
from typing_extensions import TypeAliasType

from services.common import errors
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import Within
from services.frontend.http.transport.media_types import JSON
from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.output_format import ANY_OBJECT, NO_FORMAT, OutputFormat

SchemaText = Annotated[str, Within({"contentMediaType": JSON, "pattern": r"^[ \t\r\n]*\{"})]
"""Type of a field with a JSON schema that is written as a text."""

Schema = dict[str, Any] | SchemaText
"""Type of a field with a JSON schema, as an object or as a text."""

GrammarText = Annotated[str, Within({"minLength": 1})]
"""Type of a field with a grammar that is written as a text."""


Choices = TypeAliasType(
    "Choices",
    Annotated[
        list[Annotated[str, Within({"minLength": 1})]],
        FailFast(),
        Within({"minItems": 1, "maxItems": output_format.MAX_CHOICES}),
    ],
)


class JsonSchema(ExactModel):
    """A named JSON schema in OpenAI's form."""

    name: str
    """Name of the schema; does nothing."""
    description: str | None = None
    """Does nothing."""
    schema_: Annotated[dict[str, Any], BodyField(alias="schema")]
    """The JSON schema."""
    strict: bool | None = None
    """Whether the request is refused if a keyword of the schema cannot be enforced. Otherwise the
    answer names the keyword in the header `x-orcinus-unenforced`."""


class TextFormat(ExactModel):
    """An output format: any text."""

    type: Literal["text"]
    """`text`: the output may be any text."""


class JsonObjectFormat(ExactModel):
    """An output format: a JSON object."""

    type: Literal["json_object"]
    """`json_object`: the output is a JSON object."""
    schema_: Annotated[dict[str, Any] | None, BodyField(alias="schema")] = None
    """A JSON schema that the object must match, as in llama.cpp. Without a schema, any object is
    allowed."""


class JsonSchemaFormat(ExactModel):
    """An output format: JSON that matches a schema."""

    type: Literal["json_schema"]
    """`json_schema`: the output is JSON that matches a schema."""
    json_schema: JsonSchema
    """The schema."""


def _kind_of(value: Any) -> str | None:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[JsonObjectFormat, Tag("json_object")]
    | Annotated[JsonSchemaFormat, Tag("json_schema")],
    Discriminator(_kind_of),
]


class StructuredOutputs(ExactModel):
    """Formats of the output in vLLM's form. A request must set only one of the fields."""

    json_: Annotated[Schema | None, BodyField(alias="json")] = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Whether the output must be a JSON object."""
    regex: str | None = None
    """A regular expression in Rust's syntax, which the whole output must match."""
    choice: Choices | None = None
    """Allowed texts: the output is exactly one of them."""
    grammar: GrammarText | None = None
    """A grammar in llguidance's dialect of Lark, or in GBNF."""
    structural_tag: Annotated[str | None, only()] = None
    """Not supported: must be null."""
    whitespace_pattern: Annotated[str | None, only()] = None
    """Not supported: must be null."""
    disable_any_whitespace: Annotated[bool | None, only(False)] = None
    """Not supported: must be false or null."""
    disable_additional_properties: Annotated[bool | None, only(False)] = None
    """Not supported: must be false or null."""


class OutputFormatFields(ExactModel):
    """Fields of a body by which clients ask for a format of the output."""

    response_format: ResponseFormat | None = None
    """Format of the output, in OpenAI's spelling."""
    structured_outputs: StructuredOutputs | None = None
    """Format of the output, in vLLM's spelling."""
    guided_json: Schema | None = None
    """vLLM's older spelling: a JSON schema, or its text."""
    guided_regex: str | None = None
    """vLLM's older spelling: a regular expression in Rust's syntax."""
    guided_choice: Choices | None = None
    """vLLM's older spelling: allowed texts, of which the output is exactly one."""
    guided_grammar: GrammarText | None = None
    """vLLM's older spelling: a grammar in llguidance's dialect of Lark, or in GBNF."""
    json_schema: SchemaText | None = None
    """SGLang's spelling: the text of a JSON schema."""
    regex: str | None = None
    """SGLang's spelling: a regular expression."""
    ebnf: GrammarText | None = None
    """SGLang's spelling: a grammar in llguidance's dialect of Lark, or in GBNF."""

    def output_format(self) -> OutputFormat:
        """Returns the format that the body asks for, or `NO_FORMAT` if no field asks for one.

        Raises:
            InvalidRequest: two fields ask for formats, or no grammar can be made of the format.
        """
        if self.model_fields_set.isdisjoint(OutputFormatFields.model_fields):
            return NO_FORMAT
        given = list(self._formats())
        if len(given) > 1:
            (first, _), (second, _), *_ = given
            raise errors.InvalidRequest(second, f"not together with {first}")
        return next((to_format() for _, to_format in given), NO_FORMAT)

    def _formats(self) -> Iterator[tuple[str, Callable[[], OutputFormat]]]:
        """Yields the name of each field that asks for a format, and a function that makes the
        format."""
        if isinstance(self.response_format, JsonObjectFormat | JsonSchemaFormat):
            yield "response_format", partial(_response_format, self.response_format)
        group = self.structured_outputs or StructuredOutputs()
        if group.json_object:
            field = "structured_outputs.json_object"
            yield field, partial(OutputFormat, field, output_format.json_object())
        asked: tuple[tuple[str, Any, Callable[[str, Any], OutputFormat]], ...] = (
            ("structured_outputs.json", group.json_, _of_schema),
            ("structured_outputs.regex", group.regex, _of_regex),
            ("structured_outputs.choice", group.choice, _of_choice),
            ("structured_outputs.grammar", group.grammar, _of_grammar),
            ("guided_json", self.guided_json, _of_schema),
            ("guided_regex", self.guided_regex, _of_regex),
            ("guided_choice", self.guided_choice, _of_choice),
            ("guided_grammar", self.guided_grammar, _of_grammar),
            ("json_schema", self.json_schema, _of_schema),
            ("regex", self.regex, _of_regex),
            ("ebnf", self.ebnf, _of_grammar),
        )
        for name, value, to_format in asked:
            if value is not None:
                yield name, partial(to_format, name, value)


def _of_schema(name: str, schema: Schema) -> OutputFormat:
    if isinstance(schema, str):
        schema = output_format.read_schema(schema, name)
    return OutputFormat.of_schema(name, ClientSchema(schema, name))


def _of_regex(name: str, pattern: str) -> OutputFormat:
    return OutputFormat(name, output_format.regex(pattern, field=name))


def _of_choice(name: str, texts: list[str]) -> OutputFormat:
    return OutputFormat(name, output_format.choice(texts, field=name))


def _of_grammar(name: str, text: str) -> OutputFormat:
    return OutputFormat(name, output_format.grammar(text, field=name))


def _response_format(asked: JsonObjectFormat | JsonSchemaFormat) -> OutputFormat:
    name = "response_format"
    if isinstance(asked, JsonSchemaFormat):
        given = asked.json_schema
        schema = ClientSchema(
            given.schema_, f"{name}.json_schema.schema", is_strict=bool(given.strict)
        )
        return OutputFormat.of_schema(name, schema)
    if asked.schema_ is None:
        return OutputFormat(name, output_format.json_object())
    return OutputFormat.of_schema(name, ClientSchema(ANY_OBJECT | asked.schema_, f"{name}.schema"))
