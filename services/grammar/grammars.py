"""Grammars that an output must follow: which tokens may come next.

A grammar is a text as llguidance reads it: its dialect of Lark, or JSON that holds a JSON schema, a
regular expression or such. Frontends compile it to refuse one that is wrong; ranks compile it to
mask what does not follow it. Where an output stands in its grammar is a function of its tokens
alone, so a request that is recomputed, anywhere, stands where it stood.

A rank compiles in a thread while it computes: the first mask is needed when the prompt has been
read, and other requests of the batch wait for nothing.

Every step is limited in work, which llguidance counts itself.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.sampling import MAX_COMPILED_GRAMMARS

log = logging.getLogger(__name__)

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=10_000,
    verbose_errors=False,
)
"""The work that compiling and a step may take: most steps take less than a millisecond, the worst
tens of them. llguidance does not count all of the work of compiling (`checker` limits that). Above
a size of 10,000 symbols, a grammar full of optional parts takes many seconds."""

COMPILE_LIMIT_S = 5.0
"""Seconds after which a rank gives up waiting for a grammar, and ends: sooner than others take it
for one that hangs. A grammar takes a tenth of a second of a processor at most (`checker`), and
schedulers let one new one into an iteration (`grammar_turns`)."""

STACK_BYTES = 16 * 2**20
"""Stack of the thread in which a rank compiles: four times that in which frontends check."""


class InvalidGrammar(ValueError):
    """A grammar is none, or too complex; the message says where."""


class Grammars:
    """Compiles grammars for one model, and keeps those that were used last."""

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`vocab_size` is the model's: it may have more tokens than `tokenizer.json`, and those are
        never allowed.

        Raises:
            ValueError: the file is broken, or the model has no token that ends an output.
        """
        if not eos_token_ids:
            raise ValueError("grammars need a model that has a token to end an output with")
        self._tokenizer = LLTokenizer(
            str(tokenizer_file), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._n_mask_bytes = -(-vocab_size // 32) * 4
        self._eos_mask = _mask_of(eos_token_ids, self._n_mask_bytes)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._compiler = _thread_with_stack(STACK_BYTES)

    def check(self, grammar: str) -> None:
        """Compiles a grammar, and keeps nothing of it; other threads run meanwhile.

        Raises:
            InvalidGrammar: nothing can follow it.
        """
        self._compile(grammar)

    def matcher(self, grammar: str) -> "Matcher":
        """Returns a matcher at the beginning of an output, before the grammar is compiled. If
        nothing can follow it, the output ends at once."""
        compiling = self._compiled.get(grammar)
        if compiling is None:
            compiling = self._compiler.submit(self._compile, grammar)
            self._compiled[grammar] = compiling
            if len(self._compiled) > MAX_COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return Matcher(
            compiling,
            eos_mask=self._eos_mask,
            on_error=partial(self._forget, grammar, compiling),
        )

    def _compile(self, grammar: str) -> LLMatcher:
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        mask = compiled.compute_bitmask()
        first = compiled.deep_copy()  # the first steps may be too much, too
        lowest = next((8 * i + _lowest_bit(byte) for i, byte in enumerate(mask) if byte), None)
        if lowest is not None and not first.is_stopped():
            first.consume_token(lowest)
            first.compute_bitmask()
        for matcher in (compiled, first):
            if matcher.is_error():
                raise InvalidGrammar(matcher.get_error())
        return compiled

    def _forget(self, grammar: str, compiling: Future[LLMatcher]) -> None:
        """Compiles a grammar anew next time: where one output has brought the lexer to its limit,
        all that share it end."""
        if self._compiled.get(grammar) is compiling:
            del self._compiled[grammar]


class Matcher:
    """The place of one output in its grammar. Tokens that come before its first mask is wanted are
    kept until then."""

    def __init__(
        self,
        compiling: Future[LLMatcher],
        *,
        eos_mask: bytes,
        on_error: Callable[[], None],
    ) -> None:
        self._compiling: Future[LLMatcher] | None = compiling
        self._matcher: LLMatcher | None = None
        """None before the first mask, and where nothing can follow the grammar."""
        self._ahead: list[int] = []
        self._eos_mask = eos_mask
        self._on_error = on_error

    def take(self, token_id: int) -> None:
        """Moves on by the token that came; after the output's end nothing moves any more."""
        if self._compiling is not None:
            self._ahead.append(token_id)
        elif self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._note_error(self._matcher)

    def mask(self) -> bytes:
        """Returns the tokens that may come next, [vocab_size / 32, rounded up] 32-bit words with
        the lowest bit first; waits until the grammar is compiled.

        Where nothing can follow, or a step takes too much work, these are the tokens that end the
        output: there always is one.

        Raises:
            TimeoutError: it is not compiled within COMPILE_LIMIT_S.
        """
        if self._compiling is not None:
            self._begin(self._compiling)
        if self._matcher is None or self._matcher.is_stopped():
            return self._eos_mask
        mask = self._matcher.compute_bitmask()[: len(self._eos_mask)]
        if not self._matcher.is_stopped():
            return mask
        self._note_error(self._matcher)
        return self._eos_mask

    def _begin(self, compiling: Future[LLMatcher]) -> None:
        """Waits for the grammar, and takes the tokens that have come."""
        try:
            self._matcher = compiling.result(COMPILE_LIMIT_S).deep_copy()
        except InvalidGrammar as error:
            log.error("an output ends at once, since nothing can follow its grammar: %s", error)
        self._compiling = None
        for token_id in self._ahead:
            self.take(token_id)
        self._ahead.clear()

    def _note_error(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            log.warning("an output ends early: %s", matcher.get_error())
            self._on_error()


def _thread_with_stack(n_bytes: int) -> ThreadPoolExecutor:
    """Returns an executor of one thread, which has been started with such a stack."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
    others = threading.stack_size(n_bytes)
    try:
        executor.submit(threading.get_ident).result()
    finally:
        threading.stack_size(others)
    return executor


def _lowest_bit(byte: int) -> int:
    return (byte & -byte).bit_length() - 1


def _mask_of(token_ids: Sequence[int], n_bytes: int) -> bytes:
    mask = bytearray(n_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)
