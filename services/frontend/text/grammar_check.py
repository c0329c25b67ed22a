"""Checks whether a grammar can be followed, by compiling the grammar in the same way as the workers
do. Also checks whether a finished value matches a client's schema.

Another process (`grammar_process`) compiles the grammars and checks the values, one at a time. The
number of grammars and values that wait is limited. The result of a grammar's check (the verdict) is
cached, but the compiled grammar is not.
"""

import hashlib
import logging
from collections import OrderedDict
from functools import partial
from pathlib import Path

from services.common import errors
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.memory_budget import Share
from services.frontend.request.output_format import MAX_MESSAGE_LENGTH
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.request.refusals import Refusals
from services.frontend.text.grammar_checker import CheckedModel
from services.frontend.text.grammar_process import CannotFollow, GrammarProcess, NoAnswer
from services.frontend.text.text_threads import MAX_WAITING_CHARACTERS, TextLane

log = logging.getLogger(__name__)

MAX_VERDICTS = 1024
"""Largest number of grammars whose verdicts are cached."""

MAX_WAITING = 64
"""Largest number of grammars that wait for the process. Most take 5 ms of processor time. The limit
is a tenth of a second, and more for very long grammars (`grammar_checker.COMPILE_S`)."""

MAX_VALUE_LENGTH = 2**20
"""Largest number of characters of a value; longer values are not checked."""

COPIES = 4
"""Bytes of memory that each character of a grammar takes while the grammar is checked. The memory
for compiling is not included; `settings.GRAMMARS_BYTES` counts it."""

_NONE_CAN = (
    "the model that is served can follow no format: it has no token to end an output with, or no "
    "tokenizer that is known"
)


class GrammarCheck:
    """Checks whether the served model can follow grammars, and caches the verdicts."""

    def __init__(self, tokenizer_file: Path | None, refusals: Refusals) -> None:
        """`tokenizer_file` is the `tokenizer.json` of the model. If there is none, every grammar is
        refused."""
        self._tokenizer_file = tokenizer_file
        self._lane = TextLane("grammars", refusals)
        self._model: ServedPipeline | None = None
        self._process: GrammarProcess | None = None
        self._verdicts: OrderedDict[bytes, str] = (
            OrderedDict()
        )  # the reason against a grammar; empty for none

    async def check(self, field: str, grammar: str, pipeline: ServedPipeline, share: Share) -> None:
        """Checks that the model can follow a grammar. `field` is the request's field that contains
        the grammar. The memory of the check is added to the call's share of the budget while the
        check lasts.

        Raises:
            InvalidRequest: the grammar cannot be followed. The message says where.
            PoolFull: too many grammars wait, or this grammar could not be checked.
        """
        if not pipeline.can_follow_grammars or self._tokenizer_file is None:
            raise errors.InvalidRequest(field, _NONE_CAN)
        if pipeline != self._model:
            self._model = pipeline
            self._verdicts.clear()
        digest = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await self._lane.run(
                partial(self._verdict, grammar, pipeline, self._tokenizer_file),
                share,
                n_characters=MAX_WAITING_CHARACTERS // MAX_WAITING,
                n_bytes=COPIES * len(grammar),
            )
            if pipeline == self._model:
                self._keep(digest, verdict)
        if verdict:
            raise errors.InvalidRequest(field, verdict)

    async def is_valid(
        self, schema: ClientSchema, value: str, pipeline: ServedPipeline, share: Share
    ) -> bool | None:
        """Returns whether the text `value` is JSON that matches a client's schema. Returns None if
        it could not be checked, for example because of a limit."""
        if self._tokenizer_file is None or len(value) > MAX_VALUE_LENGTH:
            return None
        work = partial(self._is_valid, schema.text, value, pipeline, self._tokenizer_file)
        try:
            return await self._lane.run(
                work,
                share,
                n_characters=MAX_WAITING_CHARACTERS // MAX_WAITING,
                n_bytes=COPIES * (len(schema.text) + len(value)),
            )
        except errors.PoolFull:
            return None

    def _is_valid(
        self, schema: str, value: str, pipeline: ServedPipeline, tokenizer_file: Path
    ) -> bool | None:
        """Returns whether a value matches a schema; None if the check was not possible. Runs in the
        thread for grammars."""
        try:
            return self._of(pipeline, tokenizer_file).is_valid(schema, value)
        except (CannotFollow, NoAnswer) as error:
            log.warning("a value could not be checked: %s", error)
            return None

    def _keep(self, digest: bytes, verdict: str) -> None:
        self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _verdict(self, grammar: str, pipeline: ServedPipeline, tokenizer_file: Path) -> str:
        """Returns the reason why a grammar cannot be followed. The result is empty if it can be
        followed. Runs in the thread for grammars."""
        process = self._of(pipeline, tokenizer_file)
        try:
            reason = process.reason_against(grammar)
        except CannotFollow as error:
            log.warning("outputs can follow no formats: %s: %s", tokenizer_file, error)
            return _NONE_CAN
        except NoAnswer as error:
            log.warning("a grammar could not be checked: %s", error)
            raise errors.PoolFull("the format could not be checked; try again") from error
        return "" if reason is None else f"cannot be followed: {reason}"[:MAX_MESSAGE_LENGTH]

    def _of(self, pipeline: ServedPipeline, tokenizer_file: Path) -> GrammarProcess:
        """Returns the process that checks grammars for a model. If there is a process for another
        model, ends it first."""
        model = CheckedModel(
            tokenizer_file=str(tokenizer_file.absolute()),
            vocab_size=pipeline.vocab_size,
            eos_token_ids=pipeline.eos_token_ids,
        )
        if self._process is None or self._process.model != model:
            if self._process is not None:
                self._process.close()
            self._process = GrammarProcess(model)
        return self._process
