"""Turns messages of `inference.proto` into `GenerationRequest`, which the gRPC API shares with the
HTTP API.

Only the syntax is checked here. Errors name fields as the HTTP API does (`top_p`, not
`options.sampling.top_p`), so that a client sees the same error in both protocols.
"""

from dataclasses import replace
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from orcinus.v1 import inference_pb2

from services.common import errors
from services.common.sampling import OPTIONS
from services.common.sampling_proto import from_proto
from services.frontend.request import output_format
from services.frontend.request.conversation import (
    MAX_TEMPLATE_KWARGS,
    MAX_TOOLS,
    MAX_TURNS,
    ChatMessage,
    Conversation,
    EarlierCall,
    Tool,
    ToolChoice,
)
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.json_object import read_json_object
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.output_format import OutputFormat
from services.frontend.request.resumption import AnswerSoFar, Resumption

MAX_SCHEMA_CHARACTERS = 2**19
"""Largest number of characters in the JSON schemas of a conversation's tools together. Parsing JSON
of this length takes up to 0.08 s; JSON that consists of brackets alone takes longest."""

_APART = ("format", "sampling", "stop", "bad_words")
"""Fields of the message `GenerationOptions` that have translation code of their own. All other
fields are copied."""

_OWN_NAMES = {"logprobs": "n_logprobs", "prompt_logprobs": "n_prompt_logprobs"}
"""Maps the names of options in the message to their names in the class `GenerationOptions`, where
the two names differ."""

_MODES: dict[int, ToolChoice] = {
    inference_pb2.ToolChoice.MODE_UNSPECIFIED: ToolChoice(),
    inference_pb2.ToolChoice.MODE_AUTO: ToolChoice(),
    inference_pb2.ToolChoice.MODE_NONE: ToolChoice(mode="none"),
    inference_pb2.ToolChoice.MODE_REQUIRED: ToolChoice(mode="required"),
}


def to_request(
    message: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
) -> GenerationRequest:
    """Returns the request that a message describes. A resumption in the message is ignored;
    `to_resumed` adds it.

    Raises:
        InvalidRequest: a field is missing, unknown, or contradicts another.
    """
    prompts = _to_prompts(message)
    if message.options.echo and isinstance(prompts[0], Conversation):
        raise errors.InvalidRequest("echo", "not with messages")
    return GenerationRequest(
        prompts=prompts, options=_to_options(message.options), model=message.model
    )


def to_resumed(
    request: GenerationRequest, message: inference_pb2.GenerateStreamRequest
) -> GenerationRequest:
    """Returns the request with the resumption that the message describes. The answers then continue
    at the point where the stream broke.

    Raises:
        InvalidRequest: the seed of the resumption differs from the seed of the request, or is out
        of its range.
    """
    so_far, sampling = message.resumption, message.options.sampling
    resumption = Resumption(
        request_id=so_far.request_id,
        seed=so_far.seed,
        answers=tuple(
            AnswerSoFar(tuple(answer.token_ids), answer.is_finished) for answer in so_far.answers
        ),
    )
    return request.resumed(
        resumption, own_seed=sampling.seed if sampling.HasField("seed") else None
    )


def check_stream(options: GenerationOptions) -> None:
    """Raises InvalidRequest for options that a stream cannot have: `prompt_logprobs`, and `best_of`
    above `n`."""
    if options.n_prompt_logprobs is not None:
        raise errors.InvalidRequest("prompt_logprobs", "not in a stream")
    if options.n_generated > options.n:
        raise errors.InvalidRequest("best_of", "not in a stream")


def to_prompt(prompt: inference_pb2.Prompt) -> Prompt:
    """Returns the prompt in a message: a text, tokens or a conversation. Raises InvalidRequest if
    the message has none of these, or if the conversation is not valid."""
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "token_ids":
            return tuple(prompt.token_ids.ids)
        case "conversation":
            return _to_conversation(prompt.conversation)
    raise errors.InvalidRequest("prompt", "must be given")


def _to_prompts(
    message: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
) -> tuple[Prompt, ...]:
    if not message.prompts:
        return (to_prompt(message.prompt),)
    if message.HasField("prompt"):
        raise errors.InvalidRequest("prompts", "not together with prompt")
    if len(message.prompts) > MAX_ANSWERS:
        raise errors.InvalidRequest(
            "prompt", f"has {len(message.prompts)} prompts; at most {MAX_ANSWERS} may be"
        )
    if any(prompt.HasField("conversation") for prompt in message.prompts):
        raise errors.InvalidRequest("prompts", "must be texts or tokens, no conversations")
    return tuple(to_prompt(prompt) for prompt in message.prompts)


def _to_conversation(message: inference_pb2.Conversation) -> Conversation:
    check_known("messages", message)
    if len(message.messages) > MAX_TURNS:
        raise errors.InvalidRequest(
            "messages", f"has {len(message.messages)} turns, {MAX_TURNS} at most"
        )
    continues_last = message.continue_final_message
    adds_prompt = (
        message.add_generation_prompt
        if message.HasField("add_generation_prompt")
        else not continues_last
    )
    return Conversation(
        tuple(_to_turn(turn) for turn in message.messages),
        tools=_to_tools(message),
        tool_choice=_to_tool_choice(message.tool_choice),
        template_kwargs=_to_kwargs(message.chat_template_kwargs),
        adds_generation_prompt=adds_prompt,
        continues_last=continues_last,
    )


def _to_turn(turn: inference_pb2.ChatMessage) -> ChatMessage:
    check_known("messages", turn)
    has_content = turn.HasField("content") or not turn.tool_calls
    return ChatMessage(
        turn.role,
        turn.content if has_content else None,
        turn.name if turn.HasField("name") else None,
        tool_calls=tuple(_to_call(call) for call in turn.tool_calls),
        tool_call_id=turn.tool_call_id if turn.HasField("tool_call_id") else None,
        reasoning_content=turn.reasoning_content if turn.HasField("reasoning_content") else None,
    )


def _to_call(call: inference_pb2.ToolCall) -> EarlierCall:
    check_known("messages", call)
    return EarlierCall(call.id, call.name, call.arguments or "{}")


def _to_tools(message: inference_pb2.Conversation) -> tuple[Tool, ...]:
    if len(message.tools) > MAX_TOOLS:
        raise errors.InvalidRequest(
            "tools", f"has {len(message.tools)} tools; at most {MAX_TOOLS} may be"
        )
    n_characters = sum(len(tool.parameters) for tool in message.tools)
    if n_characters > MAX_SCHEMA_CHARACTERS:
        raise errors.InvalidRequest(
            "tools",
            f"has {n_characters} characters of JSON schemas, {MAX_SCHEMA_CHARACTERS} at most",
        )
    return tuple(_to_tool(index, tool) for index, tool in enumerate(message.tools))


def _to_tool(index: int, tool: inference_pb2.Tool) -> Tool:
    check_known("tools", tool)
    if tool.parameters:
        read_json_object(f"tools.{index}.function.parameters", tool.parameters)
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        is_strict=tool.strict,
    )


def _to_tool_choice(message: inference_pb2.ToolChoice) -> ToolChoice:
    check_known("tool_choice", message)
    choice = (
        ToolChoice(mode="named", name=message.name)
        if message.HasField("name")
        else _MODES.get(message.mode)
    )
    if choice is None:
        raise errors.InvalidRequest("tool_choice", "must be one that is known")
    if message.HasField("parallel_tool_calls"):
        return replace(choice, allows_parallel=message.parallel_tool_calls)
    return choice


def _to_kwargs(text: str) -> dict[str, Any]:
    field = "chat_template_kwargs"
    if len(text) > MAX_TEMPLATE_KWARGS:
        raise errors.InvalidRequest(field, f"must not have more than {MAX_TEMPLATE_KWARGS} bytes")
    return read_json_object(field, text) if text else {}


def _to_options(options: inference_pb2.GenerationOptions) -> GenerationOptions:
    check_known("options", options)
    check_known("options.sampling", options.sampling)
    check_known("options.format", options.format)
    given = {
        _OWN_NAMES.get(field.name, field.name): value
        for field, value in options.ListFields()
        if field.name not in _APART
    }
    sampling = from_proto(options.sampling)
    output_format.check_length("grammar", len(sampling.grammar))
    chosen = {field.name for field, _ in options.sampling.ListFields()}
    given["defaulted"] = OPTIONS.keys() - chosen
    if options.HasField("format"):
        if sampling.grammar:
            raise errors.InvalidRequest("format", "not together with grammar")
    else:
        given["format_field"] = "grammar"
    given |= {"sampling": sampling, "stop": tuple(options.stop)}
    given["bad_words"] = tuple(options.bad_words)
    found = GenerationOptions(**given)
    return found.with_format(_to_format(options.format)) if options.HasField("format") else found


def _to_format(message: inference_pb2.OutputFormat) -> OutputFormat:
    match message.WhichOneof("format"):
        case "json_object" if message.json_object:
            return OutputFormat(grammar=output_format.json_object())
        case "json_schema":
            schema = output_format.read_schema(message.json_schema, "format")
            asked = ClientSchema(schema, "format", is_strict=message.strict)
            return OutputFormat.of_schema("format", asked)
        case "regex":
            return OutputFormat(grammar=output_format.regex(message.regex, field="format"))
        case "choice":
            return OutputFormat(grammar=output_format.choice(message.choice.texts, field="format"))
        case "grammar":
            return OutputFormat(grammar=output_format.grammar(message.grammar, field="format"))
    raise errors.InvalidRequest("format", "must be one that is known")


def check_known(field: str, message: Message) -> None:
    """Raises InvalidRequest if a message has fields that this server does not know. Such fields may
    change the tokens of the answer, so they must not be ignored."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
        raise errors.InvalidRequest(
            field,
            f"has fields that are not known here, with the numbers {numbers}; see inference.proto",
        )
