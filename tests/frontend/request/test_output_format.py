"""Formats of outputs become grammars that llguidance can follow."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.text.tokenizer import Tokenizer
from services.grammar.grammars import Grammars
from tests.grammar.compiled import matcher_of

DEMO = Path("models/demo")
EOS, VOCAB_SIZE = 0, 4096
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99, "minimum": -99},
        "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHOICES = ["a b", 'c"d\n', "é|(", "x\\y", "\x00\x1f\x7f\x80\u2028", "\N{WHALE}"]


@pytest.fixture(name="grammars", scope="module")
def make_grammars() -> Grammars:
    return Grammars(DEMO / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


@pytest.fixture(name="tokenizer", scope="module")
def make_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DEMO)


def of_schema(schema: dict[str, Any]) -> str:
    return output_format.json_schema(ClientSchema(schema, "asked"))


def outputs(grammar: str, grammars: Grammars, tokenizer: Tokenizer, *, n: int = 12) -> list[str]:
    """Outputs of a model for which all allowed tokens are equally likely."""
    texts = []
    for seed in range(n):
        chance, matcher, token_ids = Random(seed), matcher_of(grammars, grammar), [-1]
        while token_ids[-1] != EOS:
            bits = int.from_bytes(matcher.mask(), "little")
            token_ids.append(chance.choice([i for i in range(VOCAB_SIZE) if bits >> i & 1]))
            matcher.take(token_ids[-1])
            assert len(token_ids) < 200
        texts.append(tokenizer.to_text(token_ids[1:]))
    return texts


def test_a_schema_is_kept_without_white_space(grammars: Grammars, tokenizer: Tokenizer) -> None:
    texts = outputs(of_schema(SCHEMA), grammars, tokenizer)
    for text in texts:
        answer = json.loads(text)
        assert -99 <= answer["a"] <= 99
        assert set(answer["b"]) <= {True, False}
        assert text == json.dumps(answer)
    assert len(set(texts)) > 6


def test_an_object_may_have_any_fields(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, output_format.json_object())
    text = '{"a": [1, {"b": null}]}'
    for token_id in Tokenizer.from_directory(DEMO).to_tokens(text, add_special_tokens=False):
        assert int.from_bytes(matcher.mask(), "little") >> token_id & 1
        matcher.take(token_id)
    assert matcher.mask()[0] & 1 << EOS


def test_an_expression_is_matched_as_a_whole(grammars: Grammars, tokenizer: Tokenizer) -> None:
    pattern = r"[a-c]{2,4}-\d"
    for text in outputs(output_format.regex(pattern), grammars, tokenizer):
        assert re.fullmatch(pattern, text)


def test_any_text_may_be_a_choice(grammars: Grammars, tokenizer: Tokenizer) -> None:
    texts = outputs(output_format.choice(CHOICES), grammars, tokenizer, n=40)
    assert set(texts) == set(CHOICES)


@pytest.mark.parametrize(
    "text", ['start: "a" ("b" | "c")*', 'root ::= "a" ("b" | "c")*'], ids=["lark", "gbnf"]
)
def test_grammars_are_lark_or_gbnf(text: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    for output in outputs(output_format.grammar(text), grammars, tokenizer):
        assert re.fullmatch("a[bc]*", output)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
        "root ::= [a",
        "root ::= other",
        'root ::= "a"\n' * 2000,
        "\n".join(f"r{i} ::= r{i + 1}" for i in range(300)),
    ],
    ids=["depth", "syntax", "rule", "length", "rules"],
)
def test_wrong_gbnf_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        output_format.grammar(text)
    assert caught.value.field == "grammar"


class Unreadable(list[Any]):
    """A list that cannot be made into JSON."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was read")


def test_empty_lines_cost_nothing() -> None:
    began_at = time.process_time()
    assert "start" in output_format.grammar('root ::= "a"' + "\n" * 16_000)
    assert time.process_time() - began_at < 0.5  # which was seconds


@pytest.mark.parametrize(
    "ask",
    [
        lambda: output_format.read_schema("[" * 300_000, "asked"),  # which is no JSON
        lambda: of_schema({"enum": Unreadable([1] * 70_000)}),
        lambda: of_schema({"enum": [[]] * 22_000}),
        lambda: of_schema({"enum": ["x" * 70_000]}),
        lambda: of_schema({"properties": dict.fromkeys(map(str, range(30_000)), True)}),
        lambda: output_format.choice(["x" * 70_000], field="asked"),
        lambda: output_format.regex("x" * 70_000, field="asked"),
        lambda: output_format.grammar("x" * 70_000, field="asked"),
    ],
    ids=["text", "values", "lists", "string", "names", "choice", "regex", "grammar"],
)
def test_what_is_too_long_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest, match=r"65536|262144|32768") as caught:
        ask()
    assert caught.value.field == "asked"


@pytest.mark.parametrize("texts", [[], ["a", ""], ["a"] * 1025], ids=["none", "empty", "many"])
def test_wrong_choices_are_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        output_format.choice(texts)
    assert caught.value.field == "choice"
