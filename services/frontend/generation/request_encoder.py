"""Turns a request into tokens and grammars.

The output format of a request, or the tools of a conversation, are translated to a grammar. This
grammar is compiled to check that the model can follow it.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from services.common import errors
from services.common.sampling import OPTIONS
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.request.conversation import Conversation
from services.frontend.request.generation_request import (
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.limits import ModelLimits
from services.frontend.request.memory_budget import Share
from services.frontend.request.resumption import TOKENS_FIELD
from services.frontend.text.answer_format import PLAIN, AnswerFormat
from services.frontend.text.grammar_check import GrammarCheck
from services.frontend.text.message_format import MessageFormat, schema_grammars
from services.frontend.text.prompt_encoder import PromptEncoder

LONG_SCHEMAS = 2**14
"""Number of characters in the schemas of all tools above which a thread translates the schemas, so
that other tasks run meanwhile. Translating 400,000 characters takes a tenth of a second."""


class RequestEncoder:
    """Turns the prompts of requests into tokens, and checks requests against the limits of the
    model."""

    def __init__(
        self, prompts: PromptEncoder, *, grammar_check: GrammarCheck, message_format: MessageFormat
    ) -> None:
        self._prompts = prompts
        self._grammar_check = grammar_check
        self._message_format = message_format

    async def encode(
        self, request: GenerationRequest, limits: ModelLimits, share: Share
    ) -> tuple[EncodedPrompt, ...]:
        """Returns the prompts of a request as tokens, checked against the limits of the model.

        Raises:
            InvalidRequest: a prompt is too long, tokens are not in the vocabulary, a conversation
            can't be rendered, or a grammar can't be followed.
            UnknownModel: the request is for another model.
            PoolFull: there are too many requests at once.
        """
        limits.check_model(request.model)
        limits.check_kind(request.options)
        if request.options.wants_vector:
            limits = limits.of_prompts_alone()
        stop_token_ids = limits.stop_token_ids(request.options)
        if request.resumption is not None:
            for answer in request.resumption.answers:
                limits.check_tokens(TOKENS_FIELD, answer.token_ids)
        self._prompts.check_length(request, limits)
        options = request.options
        if options.sampling.grammar and not any(map(_forces_call, request.prompts)):
            await self._grammar_check.check(
                options.format_field, options.sampling.grammar, limits.pipeline, share
            )
        cut_to = limits.cut_to(options)
        encoded: list[EncodedPrompt] = []
        for index, prompt in enumerate(request.prompts):
            if encoded:
                await asyncio.sleep(0)  # lets other work run
            token_ids = await self._prompts.to_tokens(
                prompt,
                limits,
                share,
                add_special_tokens=options.add_special_tokens,
                field=request.field_of(index),
                cut_to=cut_to,
            )
            max_new_tokens = limits.max_new_tokens(
                request.options,
                n_prompt=len(token_ids),
                is_chat=isinstance(prompt, Conversation),
            )
            answer_format = PLAIN
            if isinstance(prompt, Conversation):
                answer_format = await self._answer_format(
                    prompt, token_ids, request.options, limits, share
                )
            limits.check_prompt_logprobs(request.options, n_prompt=len(token_ids))
            end_tokens = () if options.ignore_eos else answer_format.end_tokens
            all_stops = tuple(dict.fromkeys((*stop_token_ids, *end_tokens)))
            encoded.append(
                EncodedPrompt(
                    prompt,
                    token_ids,
                    max_new_tokens,
                    all_stops,
                    answer_format,
                    left_out=self._prompts.left_out(prompt),
                )
            )
        return tuple(encoded)

    async def _answer_format(
        self,
        conversation: Conversation,
        token_ids: Sequence[int],
        options: GenerationOptions,
        limits: ModelLimits,
        share: Share,
    ) -> AnswerFormat:
        """Returns the format of answers to a conversation. If the format has a grammar, checks that
        the model can follow it.

        Raises:
            InvalidRequest: the grammar cannot be followed. If the schema of a tool is the cause,
            the error names the tool.
        """
        find = partial(
            self._message_format.of,
            conversation,
            token_ids,
            asked="" if _forces_call(conversation) else options.sampling.grammar,
            asked_field=options.format_field,
        )
        n_characters = sum(len(tool.parameters) for tool in conversation.tools)
        answer_format = find() if n_characters < LONG_SCHEMAS else await asyncio.to_thread(find)
        field, grammar = answer_format.grammar_field, answer_format.grammar
        if not grammar:
            return answer_format
        if options.ignore_eos:
            raise errors.InvalidRequest("ignore_eos", f"not together with {field}")
        OPTIONS["grammar"].allowed.check(field, grammar)
        check = partial(self._grammar_check.check, pipeline=limits.pipeline, share=share)
        try:
            await check(field, grammar)
        except errors.InvalidRequest:
            schemas = self._message_format.schemas_of(conversation).values()
            for schema_field, schema in schema_grammars(schemas):
                await check(schema_field, schema)
            raise
        return answer_format

    async def check_value(
        self, schema: ClientSchema, value: str, *, limits: ModelLimits, share: Share
    ) -> bool | None:
        """Returns whether the text `value` is JSON that matches a client's schema. Returns None if
        it could not be checked, for example because of a limit."""
        return await self._grammar_check.is_valid(schema, value, limits.pipeline, share)


def _forces_call(prompt: Prompt) -> bool:
    """Returns whether the answer must be a call of a tool. Such an answer has no other text, so the
    output format that the client asks for does not apply."""
    return isinstance(prompt, Conversation) and prompt.tool_choice.mode in ("required", "named")
