"""Each format's grammar makes calls that its reader reads, and nothing else."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation, Tool, ToolChoice
from services.frontend.text.formats.registry import TOOL_FORMATS
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.tokenizer import Tokenizer
from services.grammar.grammars import Grammars
from tests.frontend import checkpoints
from tests.frontend.text.formats.cases import CANONICAL
from tests.frontend.text.formats.reading import DIVE, FIND, TOOLS, Said
from tests.grammar.compiled import matcher_of

N_SAMPLES = 2

MAX_TOKENS = 300

LIKELY = [*"<>/|\"'}])\n,apt", "</"]

HELLO = (ChatMessage("user", "hello"),)

CONTENT = {"functionary_v32": ("all\nhello", "all\nWell: >>>")}
"""Formats with marks around content: content alone, and content before a call."""

FORCED = [name for name, one in TOOL_FORMATS.items() if one.has_grammar and name in CANONICAL]

# Marks are special tokens in nearly all models. Formats of each kind are tried with marks that are
# text, too: JSON, XML and Python; the others where there is time.
AS_TEXT = {"hermes", "qwen3_coder", "pythonic"}
MARKED = [
    pytest.param(
        parser,
        is_special,
        id=f"{parser}-{'special' if is_special else 'text'}",
        marks=() if is_special or parser in AS_TEXT else pytest.mark.thorough,
    )
    for parser in FORCED
    for is_special in (False, True)
]


class Checkpoint:
    """A tokenizer in which some marks are special tokens."""

    def __init__(self, directory: Path, marks: tuple[str, ...]) -> None:
        self.library = checkpoints.byte_level()
        self.library.add_special_tokens([*marks])
        self.library.save(str(directory / "tokenizer.json"))
        self.eos: int = self.library.get_vocab()[checkpoints.EOS]
        self.tokenizer = Tokenizer.from_directory(directory)
        self.grammars = Grammars(
            directory / "tokenizer.json",
            vocab_size=self.library.get_vocab_size(),
            eos_token_ids=[self.eos],
        )
        self._likely = sum(
            1 << at
            for at in range(self.library.get_vocab_size())
            if self.library.decode([at], skip_special_tokens=False) in LIKELY
        )

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text in which marks are special tokens."""
        found: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return found

    def sampled(self, grammar: str, chance: random.Random) -> list[int] | None:
        """Returns random tokens that follow a grammar up to an end; None if there are too many.
        Tokens that end something are more frequent than others."""
        matcher, tokens = matcher_of(self.grammars, grammar), list[int]()
        while len(tokens) < MAX_TOKENS:
            mask = int.from_bytes(matcher.mask(), "little")
            if mask >> self.eos & 1 and (mask == 1 << self.eos or chance.random() < 0.5):
                return tokens
            mask &= ~(1 << self.eos)
            likely = mask & self._likely
            some = likely if likely and chance.random() < 0.7 else mask
            token = chance.choice([at for at, bit in enumerate(f"{some:b}"[::-1]) if bit == "1"])
            tokens.append(token)
            matcher.take(token)
        return None

    def follows(self, grammar: str, tokens: list[int]) -> bool:
        """Returns whether an answer may have these tokens."""
        matcher = matcher_of(self.grammars, grammar)
        for token in [*tokens, self.eos]:
            if not int.from_bytes(matcher.mask(), "little") >> token & 1:
                return False
            matcher.take(token)
        return True


def grammar_of(checkpoint: Checkpoint, parser: str, *tools: Tool, **choice: Any) -> Any:
    """Returns the format of answers to a conversation with tools."""
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser=parser)
    asked = Conversation(HELLO, tools=tools, tool_choice=ToolChoice(**choice))
    return found.of(asked, ())


def said(answers: Any, checkpoint: Checkpoint, tokens: list[int]) -> Said:
    """Returns what an answer of some tokens says."""
    text = IncrementalText(checkpoint.tokenizer, marks=answers.marks)
    reader, found = answers.reader("request", 0), Said()
    for token in tokens:
        found.add(reader.feed(text.feed(token)))
    found.add(reader.feed(text.flush()))
    found.add(reader.flush())
    return found


RICH = {
    "type": "object",
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number", "maximum": 9}}}},
    "properties": {
        "kind": {"enum": ["a b", "c"]},
        "size": {"enum": [1, 2, None]},
        "place": {"$ref": "#/$defs/Place"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "short": {"type": "string", "maxLength": 2},
        "code": {"type": "string", "pattern": "^[a-z]/[0-9]$"},
        "many": {"type": ["boolean", "null"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "place", "code", "list"],
    "additionalProperties": False,
}
MAKE = Tool(name="make", parameters=json.dumps(RICH))
SCHEMAS = {one.name: json.loads(one.parameters) for one in (*TOOLS, MAKE)}


@pytest.mark.parametrize(("parser", "is_special"), MARKED)
def test_what_a_grammar_makes_is_read_as_calls(
    tmp_path: Path, parser: str, is_special: bool
) -> None:
    checkpoint = Checkpoint(tmp_path, TOOL_FORMATS[parser].markers if is_special else ())
    answers = grammar_of(checkpoint, parser, *TOOLS, MAKE, mode="required")
    chance, n_read = random.Random(parser), 0
    for _ in range(10 * N_SAMPLES):
        tokens = checkpoint.sampled(answers.grammar, chance)
        if tokens is None:
            continue
        found = said(answers, checkpoint, tokens)
        text = checkpoint.library.decode(tokens, skip_special_tokens=False)
        assert found.calls, text
        assert not found.content, text
        for name, arguments in found.calls:
            jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))
        n_read += 1
        if n_read == N_SAMPLES:
            return
    pytest.fail("the grammar makes no short answers")


def nested(n_levels: int) -> dict[str, Any]:
    """Returns a schema in which each definition refers several times to all others."""
    names = [f"A{level}" for level in range(n_levels)]
    each = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names] * 3}
    chain = {
        f"B{level}": {"type": "array", "items": {"$ref": f"#/$defs/B{level + 1}"}}
        for level in range(50 * n_levels)
    }
    return {
        "type": "object",
        "$defs": {name: each for name in names} | chain | {f"B{50 * n_levels}": {}},
        "properties": {"a": {"$ref": "#/$defs/A0"}, "b": {"$ref": "#/$defs/B0"}},
    }


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic", "gemma4"])
def test_grammar_of_a_schema_that_refers_to_itself_is_small(tmp_path: Path, parser: str) -> None:
    checkpoint = Checkpoint(tmp_path, ())
    tool = Tool(name="dive", parameters=json.dumps(nested(12)))
    grammar = grammar_of(checkpoint, parser, tool, mode="required").grammar
    assert len(grammar) < 200_000


@pytest.mark.parametrize("parser", ["qwen3_coder", "deepseek_v4", "glm45", "gemma4"])
@pytest.mark.parametrize("more", [{"format": "email"}, {"maxLength": 5000}], ids=str)
def test_keywords_of_strings_that_cannot_be_enforced_are_named_or_refused_of_a_strict_tool(
    tmp_path: Path, parser: str, more: dict[str, Any]
) -> None:
    checkpoint = Checkpoint(tmp_path, ())
    schema = {"type": "object", "properties": {"what": {"type": "string"} | more}}
    tool = Tool(name="find", parameters=json.dumps(schema))
    named = grammar_of(checkpoint, parser, tool, mode="required").schemas["find"]
    place = f"tools.0.function.parameters.properties.what.{next(iter(more))}"
    assert named.unenforced_names == (place,)
    with pytest.raises(errors.InvalidRequest, match=next(iter(more))) as caught:
        grammar_of(checkpoint, parser, replace(tool, is_strict=True), mode="required")
    assert caught.value.field == "tools.0.function.parameters"


LITERALS, TEXTS = ("pythonic", "lfm2", "gemma4"), ("qwen3_coder", "deepseek_v4", "glm45")
EITHER = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
NOT_IN_FORMATS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "list": (LITERALS, {"type": "array", "prefixItems": [{"type": "string"}]}, "prefixItems"),
    "few": (LITERALS, {"type": "array", "items": {"type": "null"}, "minItems": 101}, "minItems"),
    "members": (
        LITERALS,
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        "patternProperties",
    ),
    "names": (LITERALS, {"type": "object", "required": ["a"]}, "required"),
    "both": (
        (*LITERALS, *TEXTS),
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
        "allOf",
    ),
    "choice": ((*LITERALS, *TEXTS), {"minLength": 3, **EITHER}, "minLength"),
    "no type": (TEXTS, {"pattern": "^a"}, "pattern"),
}


@pytest.mark.parametrize(
    ("parser", "member", "keyword"),
    [(parser, *rest) for parsers, *rest in NOT_IN_FORMATS.values() for parser in parsers],
    ids=str,
)
def test_keywords_that_json_could_enforce_but_a_format_cannot_are_named(
    tmp_path: Path, parser: str, member: dict[str, Any], keyword: str
) -> None:
    checkpoint = Checkpoint(tmp_path, ())
    schema = {"type": "object", "properties": {"what": member}, "required": ["what"]}
    tool = Tool(name="find", parameters=json.dumps(schema))
    in_json = grammar_of(checkpoint, "hermes", tool, mode="required")
    assert not in_json.schemas
    named = grammar_of(checkpoint, parser, tool, mode="required").schemas["find"]
    names = [name.removeprefix("tools.0.function.parameters.") for name in named.unenforced_names]
    assert f"properties.what.{keyword}" in names
    with pytest.raises(errors.InvalidRequest, match=rf"'{keyword}' at properties\.what cannot"):
        grammar_of(checkpoint, parser, replace(tool, is_strict=True), mode="required")


@pytest.mark.parametrize("parser", [*LITERALS, *TEXTS])
@pytest.mark.parametrize(
    ("more", "keyword"),
    [
        ({"patternProperties": {"^a": {"type": "string"}}}, "patternProperties"),
        ({"allOf": [{"properties": {"a": {"type": "string"}}}]}, "allOf"),
        ({"required": ["a"]}, "required"),
    ],
    ids=["patterns", "both", "names"],
)
def test_keywords_of_all_arguments_that_a_format_cannot_enforce_are_named(
    tmp_path: Path, parser: str, more: dict[str, Any], keyword: str
) -> None:
    tool = Tool(name="find", parameters=json.dumps({"type": "object", **more}))
    answers = grammar_of(Checkpoint(tmp_path, ()), parser, tool, mode="required")
    names = answers.schemas["find"].unenforced_names
    assert f"tools.0.function.parameters.{keyword}" in names


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_keywords_that_a_format_enforces_are_not_named(tmp_path: Path, parser: str) -> None:
    """JSON has formats of strings, and every format has short lengths and patterns."""
    members = {"what": {"type": "string", "maxLength": 20, "pattern": "^a"}}
    if parser == "hermes":
        members["what"]["format"] = "email"
    tool = Tool(name="find", parameters=json.dumps({"type": "object", "properties": members}))
    answers = grammar_of(Checkpoint(tmp_path, ()), parser, tool, mode="required")
    assert not answers.schemas


@pytest.mark.parametrize(("parser", "is_special"), MARKED)
def test_grammar_allows_what_the_model_is_trained_on(
    tmp_path: Path, parser: str, is_special: bool
) -> None:
    checkpoint = Checkpoint(tmp_path, TOOL_FORMATS[parser].markers if is_special else ())
    required = grammar_of(checkpoint, parser, *TOOLS, mode="required")
    single = grammar_of(checkpoint, parser, *TOOLS, mode="required", allows_parallel=False)
    one, several, wrong = (checkpoint.tokens(text) for text in CANONICAL[parser])
    assert checkpoint.follows(required.grammar, one)
    assert checkpoint.follows(single.grammar, one)
    assert checkpoint.follows(required.grammar, several) is TOOL_FORMATS[parser].has_parallel_calls
    assert not checkpoint.follows(single.grammar, several)
    assert not checkpoint.follows(required.grammar, wrong)
    for other in ("", "hello"):
        assert not checkpoint.follows(required.grammar, checkpoint.tokens(other))
    found = said(required, checkpoint, several)
    assert [name for name, _ in found.calls] == ["find", "dive"]
    assert json.loads(found.calls[0][1]) == {"what": "a", "n": 3}
    strict = Tool(name="find", parameters=FIND.parameters, is_strict=True)
    free = grammar_of(checkpoint, parser, strict, DIVE)
    hello, well = map(checkpoint.tokens, CONTENT.get(parser, ("hello", "Well: ")))
    assert checkpoint.follows(free.grammar, hello)
    assert checkpoint.follows(free.grammar, one)
    assert not checkpoint.follows(free.grammar, wrong)
    if not TOOL_FORMATS[parser].has_bare_calls:
        assert checkpoint.follows(free.grammar, well + one)
        assert not checkpoint.follows(free.grammar, well + wrong)
