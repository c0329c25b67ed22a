"""The tokens of each text of a message are found by their positions, however the answer is cut."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.generation.text_scores import TextScores
from services.frontend.generation.token_scores import TokenScores
from services.frontend.request.logprobs import Logprobs
from services.frontend.text.message_reader import Words

TEXT = "ab" * 20


def scores_of(first: int, offsets: Sequence[int]) -> TokenScores:
    """Returns tokens whose numbers begin with `first`."""
    numbers = range(first, first + len(offsets))
    values = Logprobs(
        array("f", map(float, numbers)), array("I", [1] * len(offsets)), array("I"), array("f")
    )
    return TokenScores(tuple(numbers), tuple(offsets), values)


@given(st.data())
def test_tokens_belong_to_the_text_in_which_they_are(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    ends = list(accumulate(lengths))
    offsets = [0, *ends[:-1]]
    bounds = data.draw(st.sets(st.integers(0, ends[-1]), max_size=6))
    texts = [(begin, end) for begin, end in pairwise(sorted(bounds)) if data.draw(st.booleans())]
    cuts = sorted({0, len(offsets), *data.draw(st.sets(st.integers(0, len(offsets)), max_size=4))})
    parts = [scores_of(begin, offsets[begin:end]) for begin, end in pairwise(cuts)]
    kept = [0]
    source = TextScores(kept.append)
    found, used = list[list[int]](), set[int]()
    for part, n_arrived in zip(parts, [ends[cut - 1] for cut in cuts[1:]], strict=True):
        source.add(part)
        while len(found) < len(texts) and texts[len(found)][1] <= n_arrived:
            begin, end = texts[len(found)]
            taken = source.take(Words(TEXT[begin:end], end=end))
            assert taken.logprobs is None or list(taken.logprobs.values) == list(taken.token_ids)
            found.append(list(taken.token_ids))
    expected = []
    for begin, end in texts:
        inside = [
            number
            for number, (at, until) in enumerate(zip(offsets, ends, strict=True))
            if at < end and (until > begin or at >= begin) and number not in used
        ]
        used.update(inside)
        expected.append(inside)
    assert [set(tokens) for tokens in found] == [set(tokens) for tokens in expected]
    source.take(Words("", end=ends[-1] + 1))
    assert sum(kept) == 0, "the memory of all tokens is given back"


def test_nothing_is_found_where_no_token_has_come() -> None:
    source = TextScores(lambda _: None)
    source.add(None)
    source.add(TokenScores())
    assert source.take(Words("ab", end=2)) == TokenScores()
