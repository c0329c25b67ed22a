"""Checks whether a grammar can be followed, by compiling it as the ranks will.

That takes up to 0.2 s, in the threads that make tokens of texts. The verdict is kept, the compiled
grammar is not.
"""

import hashlib
from collections import OrderedDict
from functools import partial
from pathlib import Path

from services.common import errors
from services.frontend.request.memory_budget import Share
from services.frontend.request.output_format import MAX_MESSAGE_LENGTH
from services.frontend.request.pipeline import Pipeline
from services.frontend.text.text_threads import SHORT_CHARACTERS, TextThreads
from services.grammar.grammars import Grammars, InvalidGrammar

MAX_VERDICTS = 1024
"""Grammars whose verdicts are kept."""

SHORT_GRAMMAR = 4096
"""Characters of the longest grammar that is quickly compiled, in about 20 ms."""

CHARACTER_WORK = SHORT_CHARACTERS // SHORT_GRAMMAR
"""Characters of a text of which tokens are made in the time that one of a grammar takes."""

CHARACTER_BYTES = 1400
"""Bytes of memory that it takes to compile each character of a grammar: 100 to 700, or twice as
many if it is nested."""

_NONE_CAN = (
    "the model that is served can follow no format: it has no token to end an output with, or no "
    "tokenizer that is known"
)


class GrammarCheck:
    """The verdicts about grammars for the model that is served."""

    def __init__(self, tokenizer_file: Path | None, threads: TextThreads) -> None:
        """Without `tokenizer_file`, the model's `tokenizer.json`, no grammar can be followed."""
        self._tokenizer_file = tokenizer_file
        self._threads = threads
        self._model: Pipeline | None = None
        self._grammars: tuple[Pipeline, Grammars] | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # why not, or nothing

    async def check(self, field: str, grammar: str, pipeline: Pipeline, share: Share) -> None:
        """Returns if the grammar, which came in `field`, can be followed. The memory that it takes
        to find out is added to the call's share meanwhile.

        Raises:
            InvalidRequest: it cannot; the message says where.
            PoolFull: there are too many texts and grammars at once.
        """
        if not pipeline.can_follow_grammars or self._tokenizer_file is None:
            raise errors.InvalidRequest(field, _NONE_CAN)
        if pipeline != self._model:
            self._model = pipeline
            self._verdicts.clear()
        digest = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await self._threads.run(
                partial(self._verdict, grammar, pipeline, self._tokenizer_file),
                share,
                n_characters=SHORT_CHARACTERS + CHARACTER_WORK * len(grammar),
                n_bytes=CHARACTER_BYTES * len(grammar),
                is_short=len(grammar) <= SHORT_GRAMMAR,
            )
            if pipeline == self._model:
                self._keep(digest, verdict)
        if verdict:
            raise errors.InvalidRequest(field, verdict)

    def _keep(self, digest: bytes, verdict: str) -> None:
        self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _verdict(self, grammar: str, pipeline: Pipeline, tokenizer_file: Path) -> str:
        try:
            self._of(pipeline, tokenizer_file).check(grammar)
        except InvalidGrammar as error:
            return f"cannot be followed: {error}"[:MAX_MESSAGE_LENGTH]
        except ValueError:
            return _NONE_CAN
        return ""

    def _of(self, pipeline: Pipeline, tokenizer_file: Path) -> Grammars:
        """Returns the grammars of the model, made when the first is asked for."""
        if self._grammars is not None and self._grammars[0] == pipeline:
            return self._grammars[1]
        grammars = Grammars(
            tokenizer_file, vocab_size=pipeline.vocab_size, eos_token_ids=pipeline.eos_token_ids
        )
        self._grammars = pipeline, grammars
        return grammars
