"""The text in the arguments of a custom tool's call."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.http.responses.custom_input import CustomInput, escaped


def read(*pieces: str) -> str:
    """Returns the input that arguments in pieces have."""
    reader = CustomInput()
    return "".join([*map(reader.feed, pieces), reader.end()])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "ls -l"}', "ls -l"),
        (' {\n "input" :\t"a\\nb" }\n', "a\nb"),
        ('{"input": "\\u00e9\\ud83d\\ude00\\ud83d"}', "é😀\ufffd"),
        ('{"input": "C:\\\\dir"}', "C:\\dir"),
        ('{"input": ""}', ""),
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        ('{"input": "\\d+ \\u12"}', "\\d+ \\u12"),
        ('{"input": "print("x")"}', 'print("x")'),
        ('{"input": "f("a", "b")"}', 'f("a", "b")'),
        ('{"input": "x", "timeout": 3}', "x"),
        ('{"timeout": 3, "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"text": "x"}', '{"text": "x"}'),
        ('"just a text"', "just a text"),
        ("*** Begin Patch", "*** Begin Patch"),
        ("{}", "{}"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut\\"),
        ('{"inp', ""),
        ('{"input": "a"', "a"),
    ],
)
def test_the_input_is_read_and_no_word_is_lost(arguments: str, expected: str) -> None:
    assert read(arguments) == expected
    assert read(*arguments) == expected


@given(st.text(), st.lists(st.integers(1, 9), min_size=1))
def test_every_text_comes_back_however_the_arguments_are_cut(text: str, sizes: list[int]) -> None:
    for arguments in (escaped(text), json.dumps({"input": text})):
        pieces: list[str] = []
        place = 0
        while place < len(arguments):
            size = sizes[len(pieces) % len(sizes)]
            pieces.append(arguments[place : place + size])
            place += size
        assert read(*pieces) == text


@given(st.text(alphabet='{}",:\\ \nuinput0d8', max_size=40), st.integers(0, 40))
def test_broken_arguments_read_alike_whole_and_in_two(text: str, place: int) -> None:
    for arguments in (text, '{"input": "' + text):
        assert read(arguments[:place], arguments[place:]) == read(arguments) == read(*arguments)


def test_the_text_comes_while_the_model_writes() -> None:
    reader = CustomInput()
    assert [reader.feed(piece) for piece in ('{"input": "a', "b\\", "nc", '"', "}")] == [
        "a",
        "b",
        "\nc",
        "",
        "",
    ]
