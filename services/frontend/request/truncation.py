"""Computes how many tokens of a text, or of two texts, are kept when a prompt is cut off at its
end."""

from collections.abc import Sequence

WHOLE = -1
"""Value of `truncate_prompt_tokens` that cuts a prompt to as many tokens as the model takes."""


class CutTooShort(ValueError):
    """Raised if a prompt is to be cut to so few tokens that one of its texts would keep no
    token."""


def kept_lengths(lengths: Sequence[int], n_tokens: int) -> tuple[int, ...]:
    """Returns, for one or two texts of these lengths, how many tokens of each are kept. Together,
    at most `n_tokens` tokens are kept. Of two texts the longer one is cut first, as in
    `transformers`."""
    if len(lengths) == 1:
        return (min(lengths[0], n_tokens),)
    first, second = lengths
    short, long = min(lengths), max(lengths)
    if short + long > n_tokens:
        long = max(short, n_tokens - short)
    if short + long > n_tokens:
        short, long = n_tokens // 2, n_tokens - n_tokens // 2
    return (short, long) if first <= second else (long, short)
