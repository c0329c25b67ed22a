"""A rank compiles a grammar beside its other work."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher

from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.grammar.grammars import Grammars
from tests.grammar.compiled import LIMIT_S, compiled, digest_of, matcher_of

TOKENIZER = Path("models/demo/tokenizer.json")
WORD, OTHER = 'start: "word"', 'start: "other"'


@pytest.fixture(name="grammars", scope="module")
def make_grammars() -> Grammars:
    return Grammars(TOKENIZER, vocab_size=4096, eos_token_ids=[1])


@pytest.fixture(name="let_compile")
def hold_compilations(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], object]:
    """Compilations wait until the returned function is called with the grammar."""
    may_compile: dict[str, threading.Event] = {WORD: threading.Event(), OTHER: threading.Event()}
    compile_now = grammars._compile

    def compile_later(grammar: str) -> LLMatcher:
        assert may_compile[grammar].wait(LIMIT_S)
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_later)
    grammars._kept.clear()
    return lambda grammar: may_compile[grammar].set()


def test_other_work_goes_on_while_a_large_grammar_is_compiled_once(grammars: Grammars) -> None:
    members = {f"member_{i}": {"type": "string", "maxLength": i + 1} for i in range(900)}
    required = {"type": "object", "properties": members, "required": list(members)}
    schema = ClientSchema(required, "schema")
    grammar = output_format.json_schema(schema)
    grammars.prepare(digest_of(grammar), grammar, on_end=lambda reason: None)
    compiling = grammars._kept[digest_of(grammar)].compiling
    n_steps = 0
    while not compiling.done():
        n_steps += 1
    assert n_steps > 100  # a compiler that held the interpreter's lock would leave no step
    assert matcher_of(grammars, grammar).mask() == matcher_of(grammars, grammar).mask()
    assert grammars._kept[digest_of(grammar)].compiling is compiling


def test_there_is_no_matcher_before_the_grammar_is_compiled(
    grammars: Grammars, let_compile: Callable[[str], object]
) -> None:
    ends: list[str] = []
    is_done = threading.Event()

    def end(reason: str) -> None:
        ends.append(reason)
        is_done.set()

    grammars.prepare(digest_of(WORD), WORD, on_end=end)
    assert grammars.matcher(digest_of(WORD)) is None
    assert not ends
    let_compile(WORD)
    assert is_done.wait(LIMIT_S)
    assert ends == [""]
    assert grammars.matcher(digest_of(WORD)) is not None


def test_a_compilation_that_does_not_end_delays_no_other_one(
    grammars: Grammars, let_compile: Callable[[str], object]
) -> None:
    grammars.prepare(digest_of(WORD), WORD, on_end=lambda reason: None)
    let_compile(OTHER)
    assert compiled(grammars, OTHER) == ""
    let_compile(WORD)
    assert compiled(grammars, WORD) == ""


def test_a_grammar_that_was_forgotten_meanwhile_is_not_reported(
    grammars: Grammars, let_compile: Callable[[str], object]
) -> None:
    """A report would let requests begin whose grammar must be compiled again."""
    reports: list[str] = []
    grammars.prepare(digest_of(WORD), WORD, on_end=reports.append)
    compiling = grammars._kept[digest_of(WORD)].compiling
    let_compile(OTHER)
    assert compiled(grammars, OTHER, kept=()) == ""
    let_compile(WORD)
    compiling.result(LIMIT_S)
    assert not reports
    assert grammars.matcher(digest_of(WORD)) is None


def test_only_the_named_grammars_are_kept(grammars: Grammars) -> None:
    digests = [digest_of(f'start: "{number}"') for number in range(4)]
    for number in range(4):
        compiled(grammars, f'start: "{number}"')
    output = grammars.matcher(digests[0])
    assert output is not None
    assert compiled(grammars, WORD, kept=digests[2:]) == ""
    assert set(grammars._kept) == {*digests[2:], digest_of(WORD)}
    assert any(output.mask())  # an output of a grammar that is not kept goes on


def test_a_wrong_grammar_is_reported_with_the_reason_and_tried_again(grammars: Grammars) -> None:
    for _ in range(2):
        assert "unknown name" in compiled(grammars, "start: nothing")
        assert grammars.matcher(digest_of("start: nothing")) is None


def test_a_compiler_that_breaks_is_reported(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(grammar: str) -> LLMatcher:
        raise MemoryError("no room")

    monkeypatch.setattr(grammars, "_compile", break_down)
    assert compiled(grammars, 'start: "breaks"') == "MemoryError: no room"
