"""POST /v1/embeddings, in the form of OpenAI: the body, the answer and the handler."""

from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import PlainValidator
from typing_extensions import TypedDict

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.generation.vector_requests import embedding_request, vector_options
from services.frontend.generation.vectors import Vector, embeddings_of, little_endian
from services.frontend.http.bodies.object_kinds import IndexedModel
from services.frontend.http.bodies.ranges import PRIORITY, SALT, TRUNCATION, Within
from services.frontend.http.openai.completion_request import OddPrompt, PromptOrPrompts, prompts_of
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.protocol.prompt_usage import PromptUsage, usage_of
from services.frontend.request.generation_request import GenerationRequest, Prompt
from services.frontend.request.texts_field import TextsField
from services.frontend.request.vector_defaults import VectorDefaults

Encoding = Literal["float", "base64"]


class Inputs(NamedTuple):
    """The prompts in the field `input` of a body, and the name of this field for errors."""

    prompts: tuple[Prompt, ...]
    field: TextsField

    @classmethod
    def of(cls, value: object) -> Self:
        """Returns the inputs in the value of the field `input`.

        Raises:
            InvalidRequest: an input is of another kind (text or tokens) than the first input.
            ValueError: the value is neither a text, nor tokens, nor a list of texts or of tokens,
            or has too many inputs.
        """
        try:
            prompts = prompts_of(value)
        except OddPrompt as odd:
            raise errors.InvalidRequest(TextsField("input").item(odd.index), odd.rule) from None
        is_list = isinstance(value, list) and isinstance(value[0], str | list)
        return cls(prompts, TextsField("input", is_single=not is_list))


class EmbeddingsBody(IndexedModel):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    """Name of the model; may be left out if the caller may use only one."""
    input: Annotated[Inputs, PlainValidator(Inputs.of, json_schema_input_type=PromptOrPrompts)]
    """The text or texts, or their tokens. Each has a vector of its own."""
    dimensions: Annotated[int | None, Within({"minimum": 1})] = None
    """Number of elements of each vector, if the checkpoint declares that its vectors may be
    shortened (Matryoshka). By default the vectors are whole."""
    encoding_format: Encoding | None = None
    """Form of the vectors. `float`, the default: a list of numbers. `base64`: little-endian floats
    of 4 bytes, in base64."""
    prompt_name: str | None = None
    """Name of a prompt in the checkpoint's `config_sentence_transformers.json`, such as `query`.
    The prompt is put before each text, but not before tokens. By default the checkpoint's default
    prompt is used."""
    add_special_tokens: bool | None = None
    """Whether to add the special tokens that the checkpoint puts around texts. The default is
    true."""
    priority: Annotated[int | None, PRIORITY] = None
    """Priority of the request, as for completions."""
    cache_salt: Annotated[str | None, SALT] = None
    """Salt of the prefix cache, as for completions."""
    truncate_prompt_tokens: Annotated[int | None, TRUNCATION] = None
    """Number of tokens, special ones included, to which longer texts are cut off at their end; -1
    for as many as the model takes. By default a text that is too long is refused."""
    user: str | None = None
    """Does nothing."""

    def to_request(self, defaults: VectorDefaults) -> GenerationRequest:
        """Returns the request in the form that all protocols share. `defaults` has the checkpoint's
        named prompts, one of which may be put before each text.

        Raises:
            InvalidRequest: an input is empty, or there is no prompt of the name `prompt_name`.
        """
        options = vector_options(
            add_special_tokens=self.add_special_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )
        return embedding_request(
            self.input.prompts,
            options,
            defaults=defaults,
            prompt_name=self.prompt_name,
            model=self.model or "",
            field=self.input.field,
        )


@answer_object
class Embedding(TypedDict):
    """The vector of one input."""

    object: Literal["embedding"]
    """Always `embedding`."""
    index: int
    """Index of the input."""
    embedding: Sequence[float] | str
    """The vector, in the form of `encoding_format`."""


@answer_object
class Embeddings(TypedDict):
    """The vectors of all inputs."""

    object: Literal["list"]
    """Always `list`."""
    data: list[Embedding]
    """One entry for each input, in their order."""
    model: str
    """Name of the model."""
    usage: PromptUsage
    """Numbers of tokens."""


async def create_embeddings(
    api: Api, body: EmbeddingsBody, account: Account
) -> AsyncGenerator[bytes, None]:
    """Yields the vectors of texts or tokens as parts of the JSON of `Embeddings`, one part for each
    vector."""
    defaults = api.models.select(body.model or "", account).service.vectors
    request = body.to_request(defaults)
    async with api.models.prepare(request, account) as generation:
        index, before = 0, b'{"object":"list","data":['
        async for vector in embeddings_of(generation, defaults, n_values=body.dimensions):
            yield before + to_json(_entry(index, vector, body.encoding_format))
            index, before = index + 1, b","
        end = to_json({"model": generation.model, "usage": usage_of(generation)})
        yield b"]," + end.removeprefix(b"{")


def _entry(index: int, vector: Vector, encoding: Encoding | None) -> Embedding:
    return {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}


def _encoded(vector: Vector, encoding: Encoding | None) -> Sequence[float] | str:
    if encoding == "base64":
        return b64encode(little_endian(vector)).decode()
    return vector.tolist()
