"""An answer's text, tokens and end."""

from collections.abc import Iterable

from services.frontend.generation.answer import Answer, Piece
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.stop_strings import StopStrings
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints

TOKENIZER = Tokenizer(checkpoints.byte_level())
A, B, C = TOKENIZER.to_tokens("abc", add_special_tokens=False)


def answer(
    *, stop: Iterable[str] = (), stop_ids: Iterable[int] = (), min_tokens: int = 0
) -> Answer:
    return Answer(
        3,
        IncrementalText(TOKENIZER),
        stops=StopStrings(stop),
        stop_token_ids=frozenset(stop_ids),
        min_tokens=min_tokens,
    )


def test_pieces_carry_text_and_tokens() -> None:
    growing = answer()
    assert growing.add([A, B]) == Piece(3, "ab", (A, B))
    assert growing.finish(FinishReason.LENGTH) == Piece(3, "", (), FinishReason.LENGTH)
    assert growing.n_tokens == 2


def test_stop_token_counts_but_has_no_text() -> None:
    growing = answer(stop_ids=[B])
    assert growing.add([A, B]) == Piece(3, "a", (A, B))
    assert not growing.is_finished
    assert growing.finish(FinishReason.STOP).finish_reason is FinishReason.STOP
    assert growing.n_tokens == 2


def test_tokens_after_a_stop_string_are_left_out() -> None:
    growing = answer(stop=["b"])
    assert growing.add([A, B, C]) == Piece(3, "a", (A, B), FinishReason.STOP)
    assert growing.is_finished
    assert growing.n_tokens == 2


def test_stop_string_waits_for_min_tokens() -> None:
    growing = answer(stop=["a"], min_tokens=3)
    assert growing.add([A, B]).text == "ab"
    assert growing.add([A]) == Piece(3, "", (A,), FinishReason.STOP)


def test_held_text_is_delivered_at_the_end() -> None:
    growing = answer(stop=["bcd"])
    assert growing.add([A, B, C]).text == "a"
    assert growing.finish(FinishReason.LENGTH) == Piece(3, "bc", (), FinishReason.LENGTH)


def test_unfinished_character_is_delivered_at_the_end() -> None:
    growing = answer()
    broken = TOKENIZER.to_tokens("🐋", add_special_tokens=False)[:2]
    assert growing.add(broken).text == ""
    assert growing.finish(FinishReason.LENGTH).text == "\ufffd"


def test_pieces_add_up() -> None:
    grown = [Piece(4, "a", (1,)), Piece(4, "b", (2, 3)), Piece(4, "", (), FinishReason.STOP)]
    assert Piece.joined(grown) == Piece(4, "ab", (1, 2, 3), FinishReason.STOP)
