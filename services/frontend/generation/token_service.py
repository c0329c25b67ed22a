"""Serves requests that need only the tokenizer: to tokenize, to detokenize, to count tokens, and to
name tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from services.frontend.api_keys import Account
from services.frontend.generation.admission import Admission
from services.frontend.generation.call_deadline import by_deadline, call_deadline
from services.frontend.generation.known_limits import KnownLimits
from services.frontend.request.generation_request import (
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.text.prompt_encoder import PromptEncoder
from services.frontend.text.tokenizer import Tokenizer

DETOKENIZED_FIELD = "tokens"
"""Name of the request field with the tokens that `detokenize` turns into text."""

NAMED_AT_ONCE = 4096
"""Number of tokens whose names are looked up before other tasks may run: a millisecond of work."""

TOKEN_NAME_BYTES = 96
"""Bytes of memory that the name of a token takes, as an object and in JSON."""


class TokenService:
    """Serves the requests of all protocols that need the tokenizer but no generation."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_encoder: PromptEncoder,
        *,
        limits: KnownLimits,
        admission: Admission,
        max_request_s: float,
    ) -> None:
        """A call may take `max_request_s` seconds; 0 sets no limit."""
        self._tokenizer = tokenizer
        self._prompt_encoder = prompt_encoder
        self._limits = limits
        self._admission = admission
        self._max_request_s = max_request_s
        self._anybody = Account()

    async def tokenize(
        self,
        prompt: Prompt,
        account: Account | None = None,
        *,
        model: str = "",
        options: GenerationOptions | None = None,
    ) -> Sequence[int]:
        """Returns the tokens that the prompt becomes when text is generated with these options. The
        call counts as a call with one answer.

        Raises:
            InvalidRequest: the prompt is too long, tokens are not in the vocabulary, a conversation
            can't be rendered, or an option or the time limit of the call is wrong.
            UnknownModel: `model` is not the model that is served.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over.
            Unavailable: there has been no pipeline yet, or this process is stopping.
        """
        deadline = call_deadline(self._max_request_s)
        options = options or GenerationOptions()
        options.check()
        request = GenerationRequest(prompts=(prompt,), options=replace(options, n=1))
        request.check()
        self._prompt_encoder.check_length(request, self._limits.last())
        with self._admission.admitted(request, account or self._anybody) as resources:
            limits = self._limits.current()
            limits.check_model(model)
            limits.stop_token_ids(options)
            encoding = self._prompt_encoder.to_tokens(
                prompt, limits, resources.share, add_special_tokens=options.add_special_tokens
            )
            return await by_deadline(deadline, encoding)

    async def count(
        self, prompt: Prompt, account: Account | None = None, *, model: str = ""
    ) -> int:
        """Returns the number of tokens of a prompt, also of a prompt that is too long for the
        model. The call counts as a call with one answer.

        Raises:
            InvalidRequest: the prompt has too many characters, a conversation can't be rendered, or
            the time limit of the call is wrong.
            UnknownModel: `model` is not the model that is served.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over.
            Unavailable: there has been no pipeline yet, or this process is stopping.
        """
        deadline = call_deadline(self._max_request_s)
        request = GenerationRequest(prompts=(prompt,))
        request.check()
        with self._admission.admitted(request, account or self._anybody) as resources:
            limits = self._limits.current()
            limits.check_model(model)
            return await by_deadline(
                deadline, self._prompt_encoder.count(prompt, limits, resources.share)
            )

    async def detokenize(
        self, token_ids: tuple[int, ...], account: Account | None = None, *, model: str = ""
    ) -> str:
        """Returns the text of tokens, including special tokens. The call counts as a call with one
        answer.

        Raises:
            InvalidRequest: there are more tokens than the model can read, a token is not in the
            vocabulary, or the time limit of the call is wrong.
            UnknownModel: `model` is not the model that is served.
            PoolFull: there are too many calls at once.
            TimedOut: the time limit of the call is over.
            Unavailable: there has been no pipeline yet, or this process is stopping.
        """
        deadline = call_deadline(self._max_request_s)
        limits = self._limits.current()
        limits.check_model(model)
        limits.check_text(DETOKENIZED_FIELD, token_ids)
        with self._admission.admitted(
            GenerationRequest(prompts=("",)), account or self._anybody
        ) as resources:
            return await by_deadline(
                deadline, self._prompt_encoder.to_text(token_ids, resources.share)
            )

    async def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the names that tokens have in the vocabulary. Raises PoolFull if the memory
        budget has too little memory left for the names."""
        names: list[str] = []
        with self._admission.budget.share(TOKEN_NAME_BYTES * len(token_ids)):
            for start in range(0, len(token_ids), NAMED_AT_ONCE):
                names += self._tokenizer.names_of(token_ids[start : start + NAMED_AT_ONCE])
                await asyncio.sleep(0)  # lets other work run
        return names
