"""Converts texts that must not be generated to banned sequences of tokens, as vLLM does.

A text is banned at the beginning of an output and after a space. For this, the text is tokenized
twice, without and with a space in front. The tokens of the text without the space are banned. The
tokens of the text with the space are banned too, if their first token differs and their number is
the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from services.common.errors import InvalidRequest
from services.common.sampling import OPTIONS
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.text.tokenizer import Tokenizer


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns, for texts that must not be generated, the sequences of tokens that are banned.

    Raises:
        InvalidRequest: a text has no tokens.
    """
    found = (sequence for word in words for sequence in _sequences(word.lstrip(), tokenizer))
    return tuple(dict.fromkeys(found))


def with_bad_words(request: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """Returns the request, with the tokens of its banned texts added to the sampling options.

    Raises:
        InvalidRequest: a text has no tokens, or all texts together have too many.
    """
    options = request.options
    if not options.bad_words:
        return request
    words = (*options.sampling.bad_words, *bad_word_tokens(options.bad_words, tokenizer))
    OPTIONS["bad_words"].allowed.check("bad_words", words)
    sampling = replace(options.sampling, bad_words=words)
    return replace(request, options=replace(options, sampling=sampling))


def _sequences(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    plain = tokenizer.to_tokens(word, add_special_tokens=False)
    if not plain:
        raise InvalidRequest("bad_words", f"{word!r} has no tokens")
    yield plain
    spaced = tokenizer.to_tokens(f" {word}", add_special_tokens=False)
    if len(spaced) == len(plain) and spaced[0] != plain[0]:
        yield spaced
