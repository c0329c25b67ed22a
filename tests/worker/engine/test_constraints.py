"""Outputs follow their grammars, whatever batches they ride in and wherever they go on."""

import json
import threading
from array import array
from functools import partial
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from orcinus.v1 import sampling_pb2

from kernels.upload import Uploads
from services.grammar.grammars import Grammars, InvalidGrammar, _Shared
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import TOKEN_ID, Request, RequestId, RequestState
from services.worker.engine.constraints import Constraints
from services.worker.engine.plan import PlanError
from tests.checkpoints import SMALL, write_checkpoint
from tests.grammar.compiled import LIMIT_S, compiled, digest_of, matcher_of
from tests.worker.engine.test_scheduled_runs import Rank, make_scheduler, serve

VOCAB_SIZE = SMALL["vocab_size"]
EOS = 95
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "is_whale": {"type": "boolean"},
        "teeth": {"enum": [40, 48, 56]},
        "sex": {"type": "string", "enum": ["f", "m"]},
    },
    "required": ["is_whale", "teeth", "sex"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
N_REQUESTS = 6


@pytest.fixture(name="tokenizer_file", scope="module")
def make_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has a token for each printable character, and one that ends outputs."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"<eos>": EOS}
    vocabulary["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"] = vocabulary.pop(" ")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(name="grammars", scope="module")
def make_grammars(tokenizer_file: Path) -> Grammars:
    return Grammars(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


@pytest.fixture(name="rank")
def make_rank(checkpoint: Path, grammars: Grammars) -> Rank:
    return Rank(checkpoint, grammars=grammars)


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def request(index: int, grammar: str = GRAMMAR, *, generated: tuple[int, ...] = ()) -> Request:
    return Request(
        RequestId(str(index)),
        prompt_token_ids=[index] * (index + 1),
        max_new_tokens=60,
        stop_token_ids=frozenset([EOS]),
        generated_token_ids=array(TOKEN_ID, generated),
        sampling=sampling_pb2.SamplingParams(
            temperature=index % 2, seed=index, stop_token_ids=[EOS]
        ).SerializeToString(),
        grammar=grammar.encode(),
        grammar_digest=digest_of(grammar) if grammar else None,
    )


def text_of(token_ids: list[int]) -> str:
    assert token_ids[-1] == EOS
    return "".join(chr(32 + token_id) for token_id in token_ids[:-1])


@pytest.fixture(name="alone", scope="module")
def make_alone(checkpoint: Path, grammars: Grammars) -> list[list[int]]:
    outputs = []
    for index in range(N_REQUESTS):
        one = request(index)
        scheduler = make_scheduler(OrcaPolicy(max_batch_size=1), depth=1, token_hand_off=False)
        serve(Rank(checkpoint, grammars=grammars), scheduler, [one])
        outputs.append(one.generated_token_ids.tolist())
    return outputs


def test_every_output_is_of_the_schema(alone: list[list[int]]) -> None:
    answers = [json.loads(text_of(tokens)) for tokens in alone]
    for answer in answers:
        assert list(answer) == SCHEMA["required"]
        assert answer["is_whale"] in (True, False)
        assert answer["teeth"] in (40, 48, 56)
        assert answer["sex"] in "fm"
    assert len({json.dumps(answer) for answer in answers}) > 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_do_not_depend_on_the_batch_or_the_depth(
    rank: Rank, alone: list[list[int]], depth: int
) -> None:
    plain = request(0, "")
    requests = [request(index) for index in range(N_REQUESTS)]
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
    serve(rank, make_scheduler(policy, depth=depth), [plain, *requests])
    assert [one.generated_token_ids.tolist() for one in requests] == alone


def test_recorded_graphs_change_no_token(
    checkpoint: Path, grammars: Grammars, alone: list[list[int]]
) -> None:
    requests = [request(index) for index in range(N_REQUESTS)]
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
    rank = Rank(checkpoint, grammars=grammars, has_graphs=True)
    serve(rank, make_scheduler(policy, depth=2), requests)
    assert [one.generated_token_ids.tolist() for one in requests] == alone


def test_other_requests_end_while_a_grammar_is_compiled(
    checkpoint: Path,
    tokenizer_file: Path,
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compilation does not end before they do: a batch that waited for it would never end."""
    grammars = Grammars(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    may_compile, compile_now, reasons = threading.Event(), grammars._compile, Queue[str]()

    def compile_later(grammar: str) -> LLMatcher:
        assert may_compile.wait(LIMIT_S)
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_later)
    rank = Rank(checkpoint, grammars=grammars)
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
    scheduler = make_scheduler(policy, depth=2)
    constrained, plain = request(1), request(2, "")
    scheduler.submit(constrained)
    due = scheduler.next_grammar()
    assert due is not None
    grammars.prepare(due.digest, due.grammar.decode(), on_end=reasons.put)
    serve(rank, scheduler, [plain], until=plain)
    assert plain.state is RequestState.FINISHED
    assert constrained.state is RequestState.INITIATION
    may_compile.set()
    scheduler.note_grammar(due.digest, reasons.get(timeout=LIMIT_S))
    serve(rank, scheduler, [])
    assert constrained.generated_token_ids.tolist() == alone[1]


@pytest.mark.parametrize("n_there", [1, 9, 25])
def test_an_output_goes_on_where_it_was(rank: Rank, alone: list[list[int]], n_there: int) -> None:
    """Those tokens came from another rank; here they are a part of the prefill, in chunks."""
    requests = [
        request(index, generated=tuple(tokens[:n_there])) for index, tokens in enumerate(alone)
    ]
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
    serve(rank, make_scheduler(policy, depth=2), requests)
    assert [one.generated_token_ids.tolist() for one in requests] == alone


@pytest.mark.parametrize(
    "grammar",
    [
        "not a grammar",
        '{"grammars": [{"json_schema": {"type": "objekt"}}]}',
        '{"grammars": [{"json_schema": {"$ref": "#/nowhere"}}]}',
        '{"grammars": [{"json_schema": {"type": "string", "pattern": "(?=a)b"}}]}',
        '{"grammars": [{"json_schema": '
        + '{"properties": {"a": ' * 500
        + "{}"
        + "}}" * 500
        + "}]}",
    ],
    ids=["lark", "type", "reference", "look-ahead", "depth"],
)
def test_wrong_grammars_are_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidGrammar):
        grammars.check(grammar)


def test_a_wrong_grammar_ends_its_request_alone(rank: Rank, alone: list[list[int]]) -> None:
    """Frontends refuse it; if one did not, the others' requests are none the worse."""
    wrong, right = request(0, "start: nothing"), request(1)
    serve(
        rank,
        make_scheduler(ChunkedPolicy(max_batch_size=4, max_batch_tokens=7), depth=2),
        [wrong, right],
    )
    assert wrong.state is RequestState.FINISHED
    assert not wrong.generated_token_ids
    assert right.generated_token_ids.tolist() == alone[1]


def test_a_rank_that_can_follow_no_grammar_refuses_the_plan() -> None:
    with pytest.raises(PlanError, match="can follow none"):
        Constraints(None).admit(0, digest_of(GRAMMAR), n_prompt_tokens=1)


def test_a_request_whose_grammar_is_not_compiled_is_refused(grammars: Grammars) -> None:
    with pytest.raises(PlanError, match="not compiled"):
        Constraints(grammars).admit(0, digest_of("start: /never/"), n_prompt_tokens=1)


LONG_TEXT = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9000}}}
)


def test_outputs_that_fill_the_lexer_they_share_change_nothing_for_others(
    tokenizer_file: Path,
) -> None:
    """Each mask is the one that a lexer without limits gives."""
    grammars = Grammars(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    unlimited = LLMatcher(LLTokenizer(str(tokenizer_file), eos_token=EOS), LONG_TEXT, log_level=0)
    first, second = matcher_of(grammars, LONG_TEXT), matcher_of(grammars, LONG_TEXT)
    first_start = None
    for number, letter in enumerate('{"a":"' + "go" * 3600):
        grammars.begin_iteration()
        expected = unlimited.compute_bitmask().ljust(len(first.mask()), b"\0")
        assert (first.mask(), second.mask()) == (expected, expected), number
        assert not first.is_cut
        first_start = first_start or first._start
        for matcher in (first, second):
            matcher.take(ord(letter) - 32)
        unlimited.consume_token(ord(letter) - 32)
    assert first._start is not first_start, "the lexer has not been full"


def test_an_output_that_is_too_much_alone_is_cut(grammars: Grammars) -> None:
    grammar = LLMatcher.grammar_from_regex("([a-z]{1,400}[0-9]{1,400}|.{9,3000}x)*")
    matcher, chance = matcher_of(grammars, grammar), Random(1)
    for _ in range(30_000):
        grammars.begin_iteration()
        bits = int.from_bytes(matcher.mask(), "little")
        if matcher.is_cut:
            break
        matcher.take(chance.choice([i for i in range(EOS) if bits >> i & 1]))
    only_eos = (1 << EOS).to_bytes(len(matcher.mask()), "little")
    assert matcher.is_cut
    assert matcher.mask() == only_eos


def test_outputs_that_end_before_their_grammars_are_told(grammars: Grammars) -> None:
    constraints = Constraints(grammars)
    for row, grammar in enumerate(('start: "a"', 'start: "b"', "start: ")):
        assert compiled(grammars, grammar) == ""
        constraints.admit(row, digest_of(grammar), n_prompt_tokens=1)
    rows = constraints.rows_of(np.array([3, 0, 1, 2]), np.array([9, 1, 1, 1]))
    assert rows is not None
    constraints.take_sent(1, 1, [0])  # which is not the letter b
    constraints.masks(rows, Uploads())
    assert constraints.cut(rows) == [2]


def test_few_grammars_are_compiled_anew_for_an_iteration(grammars: Grammars) -> None:
    shared = _Shared(partial(grammars._compile, 'start: "a"'), grammars._renewals)
    shared.compiling.result(LIMIT_S)
    grammars.begin_iteration()
    assert [shared.renewed() is not None for _ in range(4)] == [True, True, False, False]
    grammars.begin_iteration()
    assert shared.renewed() is shared.newest()


@pytest.mark.parametrize("vocab_size", [EOS - 7, EOS + 1, EOS + 40])
def test_only_tokens_of_both_the_model_and_its_tokenizer_are_allowed(
    tokenizer_file: Path, vocab_size: int
) -> None:
    eos = ord("b") - 32
    grammars = Grammars(tokenizer_file, vocab_size=vocab_size, eos_token_ids=[eos, 9000])
    known = set(range(min(vocab_size, EOS + 1)))
    for grammar, allowed in (("start: <[^5]>", known - {5}), ("start: <[93]>", {93} & known)):
        matcher = matcher_of(grammars, grammar)
        assert len(matcher.mask()) == -(-vocab_size // 32) * 4
        assert tokens_of(matcher.mask()) == (allowed or {eos})


@pytest.mark.parametrize("eos_token_ids", [[], [EOS + 1]])
def test_a_model_without_an_end_can_follow_no_grammar(
    tokenizer_file: Path, eos_token_ids: list[int]
) -> None:
    with pytest.raises(ValueError, match="to end an output"):
        Grammars(tokenizer_file, vocab_size=EOS + 9, eos_token_ids=eos_token_ids)


def tokens_of(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1}


def test_a_grammar_whose_second_step_is_too_much_is_refused(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
    with pytest.raises(InvalidGrammar, match="items"):
        grammars.check(json.dumps({"grammars": [{"json_schema": schema}]}))


def test_where_nothing_can_follow_the_output_ends(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, 'start: "a"')
    only_eos = (1 << EOS).to_bytes(len(matcher.mask()), "little")
    matcher.take(ord("a") - 32)
    assert matcher.mask() == only_eos
    for _ in range(2):  # a request rides on until its end is known
        matcher.take(EOS)
        assert matcher.mask() == only_eos
    lost = matcher_of(grammars, 'start: "a"')
    lost.take(ord("b") - 32)
    assert lost.mask() == only_eos


class Late:
    """Tokens that arrive when somebody waits for them."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def wait(self) -> tuple[int, ...]:
        return self._tokens


def test_a_token_that_arrives_late_is_not_the_next_holders(grammars: Grammars) -> None:
    assert compiled(grammars, 'start: "ab"') == ""
    constraints = Constraints(grammars)
    constraints.admit(0, digest_of('start: "ab"'), n_prompt_tokens=3)
    row, position = np.array([0]), np.array([3])
    first = constraints.rows_of(row, position)
    assert first is not None
    constraints._arriving.append((first, Late(ord("a") - 32)))
    constraints.release(0)
    constraints.admit(0, digest_of('start: "ab"'), n_prompt_tokens=3)
    second = constraints.rows_of(row, position)
    assert second is not None
    masks = constraints.masks(second, Uploads()).masks.numpy()
    assert np.unpackbits(masks.view(np.uint8), bitorder="little").nonzero()[0] == [ord("a") - 32]
