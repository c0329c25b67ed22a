"""Checks whether a grammar can be followed, by compiling it as the ranks will."""

import asyncio
import threading
from pathlib import Path

from services.common import errors
from services.common.grammar import Grammars, InvalidGrammar
from services.frontend.request.pipeline import Pipeline

MAX_MESSAGE_LENGTH = 500
"""Characters of an explanation that a client gets."""


class GrammarCheck:
    """The grammars of the model that is served, compiled one at a time beside the event loop."""

    def __init__(self, model: Path) -> None:
        """`model` is the directory of the checkpoint."""
        self._tokenizer_file = model / "tokenizer.json"
        self._grammars: Grammars | None = None
        self._model: tuple[int, tuple[int, ...]] | None = None
        self._turn = asyncio.Lock()
        self._compiling = threading.Lock()  # a caller that is cancelled leaves its thread behind

    async def check(self, grammar: str, pipeline: Pipeline) -> None:
        """Returns if the grammar can be followed.

        Raises:
            InvalidRequest: it cannot; the message says where.
        """
        async with self._turn:
            await asyncio.to_thread(self._check, grammar, pipeline)

    def _check(self, grammar: str, pipeline: Pipeline) -> None:
        if not pipeline.eos_token_ids:
            raise errors.InvalidRequest(
                "grammar", "the model has no token to end an output with, so it can follow none"
            )
        with self._compiling:
            try:
                self._of(pipeline).matcher(grammar)
            except InvalidGrammar as error:
                raise errors.InvalidRequest(
                    "grammar", f"cannot be followed: {str(error)[:MAX_MESSAGE_LENGTH]}"
                ) from None

    def _of(self, pipeline: Pipeline) -> Grammars:
        model = (pipeline.vocab_size, pipeline.eos_token_ids)
        if self._grammars is None or self._model != model:
            self._grammars = Grammars(
                self._tokenizer_file,
                vocab_size=pipeline.vocab_size,
                eos_token_ids=pipeline.eos_token_ids,
            )
            self._model = model
        return self._grammars
