"""Patterns of ECMA-262 mean the same to the grammar engine, or are not enforced."""

import contextlib
import json

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.request.json_schema.patterns import enforceable
from tests.frontend.request.json_schema.engine import CannotCompile, accepts, client_schema

ENFORCED = [
    *("", "a", "^a", "a$", "^a$", "^a|b$", "(^a|b$)", "^(?:a|b)+?$", "^(?<name>a)$"),
    *(
        r"^\d{2,3}$",
        r"^[\w-]+$",
        r"^[^\s]$",
        r"^\S\D\W$",
        r"^[\D]$",
        r"^\/\-\.\_$",
        "^[[]$",
        "^]}$",
    ),
    *(r"^A\x41\u{41}$", "^[a-c&&b]$"),
    *(r"^\p{L}$", r"^[\p{Lu}\d]$", r"^\p{Script=Greek}$", "^\N{SPOUTING WHALE}$", "^[.]$", "^<>$"),
]
OTHERS = [
    (r"^\cA\t\0$", ["\x01\t\0"], ["A", "\x01"]),
    ("^a{$", ["a{"], ["a"]),
    ("^[^]$", ["a", "\n"], ["", "aa"]),
    (r"^[\b]$", ["\b"], ["b"]),
    ("^.$", ["a", "é"], ["\n", "\r", "\u2028", ""]),
]
"""Patterns that the library for the comparison does not read, or reads otherwise, with texts that
match and texts that do not."""

NOT_ENFORCED = [
    *("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", r"\ba", r"(a)\1", r"\k<n>", "a^b", "a$b", "(a$)b"),
    *("(^a)+", "*a", "a**", "(", ")", "[a", r"\q", "a{3,2}", "(?i)a", r"\u{110000}", r"[\d-x]"),
    *("((a{100}){100}){100}", "(" * 40 + ")" * 40, "a" * 5000),
]
TEXTS = ["", "a", "b", "ab", "ba", "xa", "xb", "aa", "12", "1234", "a-1", " ", "\xa0", "\n", "\r"]
TEXTS += [
    "[",
    "]}",
    "a{",
    "AAA",
    "\x01\t\0",
    "\b",
    "é",
    "É",
    "\N{GREEK SMALL LETTER ALPHA}",
    "é-",
    "\u2028",
    "-._/",
    "/-._",
]
TEXTS += ["\N{SPOUTING WHALE}", ".", "<>", "&", "c", "x x", "a,-"]


def check(pattern: str, texts: list[str]) -> None:
    """Asserts that the engine accepts the texts that match a pattern, and no others."""
    schema = {"type": "string", "pattern": pattern}
    asked = client_schema(schema)
    validator = jsonschema_rs.Draft202012Validator(schema)
    for text in texts:
        is_accepted = accepts(asked, json.dumps(text, ensure_ascii=False))
        assert is_accepted == validator.is_valid(text), (pattern, text)


@pytest.mark.parametrize("pattern", ENFORCED)
def test_a_pattern_matches_the_same_texts(pattern: str) -> None:
    assert enforceable(pattern) is not None
    check(pattern, TEXTS)


@pytest.mark.parametrize(("pattern", "good", "bad"), OTHERS)
def test_rare_patterns_match_as_in_ecmascript(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    asked = client_schema({"type": "string", "pattern": pattern})
    assert not asked.unenforced
    for text in good + bad:
        assert accepts(asked, json.dumps(text, ensure_ascii=False)) is (text in good)


@pytest.mark.parametrize("pattern", NOT_ENFORCED, ids=lambda pattern: pattern[:20])
def test_a_pattern_that_the_engine_does_not_know_is_not_enforced(pattern: str) -> None:
    assert enforceable(pattern) is None


ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\x61", "-", "é"])
COUNTS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "+?"])
PATTERNS = st.recursive(
    st.builds(str.__add__, ATOMS, COUNTS),
    lambda inner: (
        st.lists(inner, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda many: f"({'|'.join(many)})")
    ),
    max_leaves=6,
)


@given(pattern=PATTERNS, texts=st.lists(st.text("ab1-é", max_size=4), min_size=4, max_size=8))
def test_made_up_patterns_match_the_same_texts(pattern: str, texts: list[str]) -> None:
    if enforceable(pattern) is None:
        return
    with contextlib.suppress(CannotCompile):  # no text matches
        check(pattern, texts)
