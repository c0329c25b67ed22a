"""Grammars that outputs must follow; a grammar decides which tokens may come next.

A grammar is a text that llguidance reads: in llguidance's dialect of Lark, or JSON that contains
for example a JSON schema or a regular expression. Frontends compile a grammar to refuse it if it is
wrong; ranks compile it to mask tokens that do not follow it. The state of an output in its grammar
depends only on the output's tokens, so a request that is recomputed, on any rank, reaches an equal
state.

A rank compiles a grammar in a thread while it computes, and reports when the grammar is compiled.
The scheduler admits no request with the grammar before that, so no batch waits for a grammar. The
exception is a grammar whose lexer is full: it is compiled again in the middle of an iteration.

llguidance limits the work of every step.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.tokenizer_files.find import read_tokenizer
from services.grammar.compile_thread import in_thread

log = logging.getLogger(__name__)

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=5_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Limits of the work of compiling a grammar and of one step. Most steps take less than a
millisecond, the slowest tens of milliseconds. llguidance does not limit all of the work of
compiling, which the frontend limits (`grammar_checker`). The schemas of 200 tools make up to 90,000
symbols."""

RENEWAL_LIMIT_S = 5.0
"""Timeout in seconds for compiling a grammar again. A rank whose grammar takes longer ends. The
timeout is shorter than the time after which other ranks regard a rank as hung. Nearly every grammar
takes less than a tenth of a second of processor time, and the slowest 1.6 s (`grammar_checker`)."""

MAX_RENEWALS = 2
"""Largest number of grammars that may be compiled again in one iteration because their lexers are
full. Outputs whose grammars would exceed this number are ended before their grammars allow it. This
happens only if several grammars need very many lexer states for every text."""


class InvalidGrammar(ValueError):
    """Raised if a grammar is wrong or too complex. The message says what is wrong."""


class Grammars:
    """Compiles grammars for one model, and keeps the compiled grammars that the scheduler names.

    One thread may call `prepare` while another one calls the other methods.
    """

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`tokenizer_file` is the file of the checkpoint that `find.tokenizer_file` returns, and
        `vocab_size` is the size of the model's vocabulary. Only tokens that both the tokenizer and
        the model have are ever allowed.

        Raises:
            ValueError: the file is broken, or has no token that ends an output.
        """
        self._tokenizer = _tokenizer(tokenizer_file, vocab_size, eos_token_ids)
        self._vocabulary = _SharedVocabulary(
            vocab_size=vocab_size,
            n_known=self._tokenizer.vocab_size,
            eos_token_ids=self._tokenizer.eos_tokens,
        )
        self._kept: dict[bytes, _Shared] = {}  # by digest
        self._renewals = _Renewals()

    def check(self, grammar: str) -> None:
        """Compiles a grammar and drops the result. Other threads can run during the call.

        Raises:
            InvalidGrammar: the grammar is wrong or too complex.
        """
        self._compile(grammar)

    def begin_iteration(self) -> None:
        """Resets the number of grammars that may be compiled again. Must be called before the first
        mask of each iteration."""
        self._renewals.n_left = MAX_RENEWALS

    def prepare(
        self,
        digest: bytes,
        grammar: str,
        *,
        kept: Collection[bytes] = (),
        on_end: Callable[[str], None],
    ) -> None:
        """Starts to compile a grammar in another thread, and returns at once. Forgets the grammars
        that are not in `kept`; outputs that already follow such a grammar continue.

        When the grammar is compiled, `on_end` is called, perhaps in the other thread, with the
        reason why no output can follow the grammar. The reason is empty if outputs can follow the
        grammar. If the grammar has been forgotten meanwhile, `on_end` is not called.
        """
        self._kept = {
            one: shared
            for one, shared in self._kept.items()
            if (one == digest or one in kept) and not shared.failure
        }
        if digest not in self._kept:
            self._kept[digest] = _Shared(partial(self._compile, grammar), self._renewals)
        shared = self._kept[digest]

        def end(_: object) -> None:
            if self._kept.get(digest) is shared:
                on_end(shared.failure)

        shared.compiling.add_done_callback(end)

    def matcher(self, digest: bytes) -> "Matcher | None":
        """Returns a matcher of the grammar with this digest, at the beginning of an output. Returns
        None if the grammar is not compiled."""
        shared = self._kept.get(digest)
        if shared is None or not shared.compiling.done() or shared.failure:
            return None
        return Matcher(shared, self._vocabulary)

    def _compile(self, grammar: str) -> LLMatcher:
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        mask = compiled.compute_bitmask()
        first = compiled.deep_copy()  # the first steps may also take too much work
        lowest = next((8 * i + _lowest_bit(byte) for i, byte in enumerate(mask) if byte), None)
        if lowest is not None and not first.is_stopped():
            first.consume_token(lowest)
            first.compute_bitmask()
        for matcher in (compiled, first):
            if matcher.is_error():
                raise InvalidGrammar(matcher.get_error())
        return compiled


class _Shared:
    """A compiled grammar with its lexer, which all outputs that follow the grammar share.

    The lexer keeps every state that any of the outputs has reached, up to a limit. At the limit the
    grammar is compiled again. Outputs then use the new lexer, which has only the states that their
    tokens need.
    """

    def __init__(self, compile_now: Callable[[], LLMatcher], renewals: "_Renewals") -> None:
        self._compile = compile_now
        self._renewals = renewals
        self.compiling: Future[LLMatcher] = in_thread(compile_now, is_urgent=False)
        """The future of the compiled grammar."""

    @property
    def failure(self) -> str:
        """The reason why the grammar could not be compiled. The value is empty if the grammar is
        compiled, or is still being compiled."""
        error = self.compiling.exception() if self.compiling.done() else None
        if error is None:
            return ""
        text = str(error)
        return text if isinstance(error, InvalidGrammar) else f"{type(error).__name__}: {text}"

    def newest(self) -> LLMatcher:
        """Returns the matcher of the compiled grammar in its first state. The grammar must have
        been compiled. Callers must copy the matcher before they advance it."""
        return self.compiling.result(0)

    def renewed(self) -> LLMatcher | None:
        """Compiles the grammar again, with an empty lexer, and waits until it is compiled. Returns
        the compiled grammar, or None if too many grammars have been compiled again in this
        iteration.

        Raises:
            InvalidGrammar: the grammar could not be compiled again.
            TimeoutError: the grammar was not compiled again within RENEWAL_LIMIT_S.
        """
        if not self._renewals.n_left:
            return None
        self._renewals.n_left -= 1
        again = in_thread(self._compile, is_urgent=True)
        compiled = again.result(RENEWAL_LIMIT_S)
        self.compiling = again
        return compiled


class _Renewals:
    """The number of grammars that may still be compiled again in an iteration."""

    def __init__(self) -> None:
        self.n_left = MAX_RENEWALS


class Matcher:
    """The state of one output in its grammar.

    The state depends only on the tokens of the output. The tokens are stored, so that the output
    can change to a new lexer when the shared lexer is full.
    """

    def __init__(self, shared: _Shared, vocabulary: "_SharedVocabulary") -> None:
        self.is_cut = False
        """Whether the output ends before its grammar allows an end, because a step takes too much
        work or because no token can follow."""
        self._shared = shared
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._has_ended = False
        self._start: LLMatcher | None = None  # `_matcher` is a copy of it
        self._matcher: LLMatcher | None = None
        """The matcher of llguidance. None before the first mask, and after the end."""

    def take(self, token_id: int) -> None:
        """Advances the state by a token. Has no effect after the end of the output."""
        self._tokens.append(token_id)
        if self._matcher is not None:
            self._matcher.consume_token(token_id)

    def mask(self) -> bytes:
        """Returns the tokens that may come next as a mask of bits: [vocab_size / 32, rounded up]
        words of 32 bits, with the lowest bit first.

        If no token can follow, or a step takes too much work, the mask allows only the tokens that
        end the output. So a mask always allows at least one token.

        Raises:
            TimeoutError: the grammar was not compiled again within RENEWAL_LIMIT_S.
        """
        mask = None if self._has_ended else self._next_mask()
        if mask is None:
            self._end()
            return self._vocabulary.eos_mask
        return mask

    def _next_mask(self) -> bytes | None:
        """Returns the mask of the tokens that may come next. Returns None if no token can follow,
        or if a step takes too much work."""
        try:
            for matcher in self._attempts():
                mask = self._mask_of(matcher)
                if not _is_full(matcher):
                    break
        except InvalidGrammar as error:
            log.warning("an output is cut, since its grammar is not compiled again: %s", error)
            self.is_cut = True
            return None
        if matcher.is_error():
            log.warning("an output is cut: %s", matcher.get_error())
            self.is_cut = True
        return mask

    def _attempts(self) -> Iterator[LLMatcher]:
        """Yields matchers of the output's grammar. The caller stops at the first one whose lexer is
        not full.

        The first is the current matcher, if there is one. Then comes a matcher with the newest
        lexer, unless the current matcher has it. The last is a matcher with a new lexer, which has
        taken only the tokens of this output. It is left out if too many grammars have been compiled
        again in this iteration.
        """
        if self._matcher is not None:
            yield self._matcher
        newest = self._shared.newest()
        if newest is not self._start:
            yield self._go_on_in(newest)
        renewed = self._shared.renewed()
        if renewed is not None:
            yield self._go_on_in(renewed)

    def _go_on_in(self, start: LLMatcher) -> LLMatcher:
        """Replaces the current matcher by a copy of the matcher `start` that has taken all tokens
        of the output, and returns the copy."""
        self._start = start
        self._matcher = start.deep_copy()
        for token_id in self._tokens:
            if not self._matcher.consume_token(token_id):
                break
        return self._matcher

    def _mask_of(self, matcher: LLMatcher) -> bytes | None:
        if matcher.is_stopped():
            return None
        mask = matcher.compute_bitmask()
        return None if matcher.is_stopped() else self._vocabulary.cut(mask)

    def _end(self) -> None:
        self._has_ended = True
        self._start = self._matcher = None


class _SharedVocabulary:
    """Bit masks over the tokens that both a model and its tokenizer have."""

    def __init__(self, *, vocab_size: int, n_known: int, eos_token_ids: Sequence[int]) -> None:
        self._n_bytes = -(-vocab_size // 32) * 4
        self.eos_mask = _mask_of(eos_token_ids, self._n_bytes)
        """Mask of the tokens that end an output."""
        self._common = int.from_bytes(_mask_of(range(vocab_size), self._n_bytes), "little")
        self._is_cut = n_known > vocab_size

    def cut(self, mask: bytes) -> bytes | None:
        """Converts a mask over the tokenizer's vocabulary to a mask over the model's vocabulary.

        Returns None if no token is left.
        """
        if not self._is_cut:
            return mask[: self._n_bytes].ljust(self._n_bytes, b"\0")
        tokens = int.from_bytes(mask, "little") & self._common
        return tokens.to_bytes(self._n_bytes, "little") if tokens else None


def _tokenizer(tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Returns the tokenizer in the form that llguidance needs. An output ends with any token of
    `eos_token_ids` that the tokenizer has.

    Raises:
        ValueError: the file is broken, or the tokenizer has none of `eos_token_ids`.
    """
    # llguidance accepts the content of a `tokenizer.json`.
    file = read_tokenizer(tokenizer_file)
    known = [one for one in eos_token_ids if one < vocab_size]
    if known:
        with suppress(ValueError):  # the tokenizer lacks a token, or the file is broken
            return LLTokenizer(file, eos_token=known)
        own_size = LLTokenizer(file).vocab_size
        known = [one for one in known if one < own_size]
    if not known:
        raise ValueError("grammars need a model that has a token to end an output with")
    return LLTokenizer(file, eos_token=known)


def _is_full(matcher: LLMatcher) -> bool:
    """Returns whether the lexer of a matcher has reached the limit of its states.

    llguidance reports this only in the text of its error.
    """
    return matcher.is_error() and "too many states" in matcher.get_error()


def _lowest_bit(byte: int) -> int:
    return (byte & -byte).bit_length() - 1


def _mask_of(token_ids: Iterable[int], n_bytes: int) -> bytes:
    mask = bytearray(n_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)
