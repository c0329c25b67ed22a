"""The log-probabilities of an answer: they come with the text that is delivered."""

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.generation.answer import Answer, Piece
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import Logprobs
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.stop_strings import StopStrings
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints

TOKENIZER = Tokenizer(checkpoints.byte_level())
LETTERS = TOKENIZER.to_tokens("ab", add_special_tokens=False)
WHALE = TOKENIZER.to_tokens("🐋", add_special_tokens=False)


def values(token_ids: Sequence[int]) -> Logprobs:
    n_tokens = len(token_ids)
    return Logprobs(
        array("f", map(float, token_ids)), array("I", [1] * n_tokens), array("I"), array("f")
    )


def pieces_of(cuts: Sequence[Sequence[int]], stop: str, *, shows_tokens: bool) -> list[Piece]:
    growing = Answer(
        0,
        IncrementalText(TOKENIZER),
        stops=StopStrings([stop]),
        stop_token_ids=frozenset(),
        min_tokens=0,
        has_scores=True,
        shows_tokens=shows_tokens,
    )
    pieces = []
    for token_ids in cuts:
        pieces.append(growing.add(token_ids, values(token_ids)))
        if growing.is_finished:
            return pieces
    return [*pieces, growing.finish(FinishReason.LENGTH)]


answers = st.lists(
    st.lists(st.sampled_from([*LETTERS, *WHALE]), min_size=1, max_size=4), min_size=1, max_size=6
)


@given(answers, st.text("ab🐋", min_size=1, max_size=4))
def test_scores_end_with_the_text_however_the_answer_is_cut(
    cuts: list[list[int]], stop: str
) -> None:
    pieces = pieces_of(cuts, stop, shows_tokens=False)
    token_ids = [token_id for token_ids in cuts for token_id in token_ids]
    whole = Piece.joined(pieces)
    at_once = Piece.joined(pieces_of([token_ids], stop, shows_tokens=False))
    assert (whole.text, whole.scores) == (at_once.text, at_once.scores)
    assert whole.scores is not None
    n_shown = len(whole.scores.token_ids)
    assert list(whole.scores.token_ids) == token_ids[:n_shown]
    assert whole.scores.logprobs == values(token_ids[:n_shown])
    if whole.finish_reason is FinishReason.LENGTH:
        assert n_shown == len(token_ids)
    else:
        assert all(offset < len(whole.text) for offset in whole.scores.offsets)
        incremental = IncrementalText(TOKENIZER)
        written = "".join(map(incremental.feed, token_ids[:n_shown]))
        assert written.startswith(whole.text)
    n_characters = 0
    for piece in pieces:
        n_characters += len(piece.text)
        if piece.scores is not None and piece.finish_reason is None:
            assert all(offset < n_characters for offset in piece.scores.offsets)


@given(answers, st.text("ab🐋", min_size=1, max_size=4))
def test_scores_belong_to_the_tokens_that_the_client_gets(cuts: list[list[int]], stop: str) -> None:
    for piece in pieces_of(cuts, stop, shows_tokens=True):
        assert piece.scores is not None
        assert piece.scores.token_ids == piece.token_ids
