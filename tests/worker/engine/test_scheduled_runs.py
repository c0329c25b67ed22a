"""Scheduler, wire and model together, without processes: whatever is batched, cut into chunks or
handed over on the rank, each request gets the tokens that it gets alone."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from orcinus.v1 import sampling_pb2, worker_pb2

from kernels.upload import StagedUploads
from services.grammar.grammars import Grammars
from services.scheduler.core.admission.grammar_gate import DueGrammar
from services.scheduler.core.batch import Batch
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import FinishReason, Request, RequestId, RequestState
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.pipeline.plan import plan_of
from services.worker.engine.input_batch import BatchBuilder
from services.worker.engine.model_runner import ModelRunner
from services.worker.rank import wire
from tests.checkpoints import SMALL, write_checkpoint
from tests.fakes import describe_stage
from tests.grammar.compiled import compiled
from tests.scheduler.core.workload import build
from tests.worker.engine.fixed_shapes import CPU, RepeatedCall, load_fixed
from tests.worker.pipeline import load

N_BLOCKS = 60
PLACE = Pipeline("p", 1, (Member("stage-0:1", describe_stage()),))


@dataclass(frozen=True)
class Want:
    """A request to be."""

    n_prompt: int
    max_new_tokens: int
    temperature: float
    min_tokens: int = 0
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repetition_penalty: float = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()

    def request(self, index: int, stops: frozenset[int] = frozenset()) -> Request:
        return Request(
            RequestId(str(index)),
            prompt_token_ids=random.Random(index).choices(
                range(SMALL["vocab_size"]), k=self.n_prompt
            ),
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=stops,
            sampling=sampling_pb2.SamplingParams(
                temperature=self.temperature,
                top_p=1,
                seed=index,
                min_tokens=self.min_tokens,
                stop_token_ids=stops,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                allowed_token_ids=self.allowed_token_ids,
                bad_token_ids=self.bad_token_ids,
                bad_words=[sampling_pb2.TokenSequence(token_ids=one) for one in self.bad_words],
            ).SerializeToString(),
        )


BAD_WORDS = ((3, 33), (33, 3, 60), (60, 60))

WANTS = [
    Want(5, 9, 1.0),
    Want(17, 6, 1.0),
    Want(1, 12, 0.0),
    Want(11, 1, 1.0),
    Want(9, 10, 1.0, min_tokens=3),
    Want(23, 4, 0.7),
    Want(8, 12, 0.0, frequency_penalty=1.5),
    Want(12, 9, 0.8, presence_penalty=0.5, repetition_penalty=1.3, min_tokens=2),
    Want(3, 10, 0.0, presence_penalty=-2, frequency_penalty=-0.5),
    Want(6, 16, 1.0, allowed_token_ids=(3, 33, 60), bad_words=BAD_WORDS),
    Want(6, 8, 1.0, allowed_token_ids=(3, 33, 60), frequency_penalty=0.5),
    Want(7, 8, 0.0, logit_bias={5: 100, 6: 99}, bad_token_ids=(5,)),
]


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class Rank:
    """A rank of one stage, without its process."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        batch_builder: type[BatchBuilder] = BatchBuilder,
        grammars: Grammars | None = None,
        has_graphs: bool = False,
    ) -> None:
        self._grammars = grammars
        self._runner = ModelRunner(
            load_fixed(checkpoint) if has_graphs else load(checkpoint),
            n_kv_blocks=N_BLOCKS,
            block_size=4,
            batch_builder=batch_builder,
            grammars=grammars,
            new_graph=RepeatedCall if has_graphs else None,
            max_graph_batch_size=4,
            uploads=StagedUploads(CPU) if has_graphs else None,
        )

    def prepare(self, due: DueGrammar) -> str:
        """Compiles a grammar and returns the reason why that failed, or an empty text."""
        assert self._grammars is not None
        return compiled(self._grammars, due.grammar.decode(), kept=due.kept)

    def run(self, batch: Batch) -> list[int]:
        """The tokens of one iteration, whose plan has been on the wire."""
        data = plan_of(batch, PLACE).SerializeToString()
        plan = wire.plan_of(worker_pb2.RunIterationsRequest.FromString(data))
        inputs = self._runner.prepare(plan)
        tokens: list[int] = self._runner.sample(inputs, self._runner.logits(inputs, None)).tolist()
        return tokens


def serve(
    rank: Rank,
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    cancelled: Request | None = None,
    until: Request | None = None,
) -> int:
    """Runs all to their ends, a new one with every iteration; results come when no more batches may
    be sent. Returns how many tokens were left out of plans. With `until`, it ends with that
    request."""
    waiting = list(requests)
    in_flight: list[tuple[int, list[int]]] = []
    n_left_out = 0
    while waiting or len(scheduler.pool) or in_flight:
        if until is not None and until.state is RequestState.FINISHED and not in_flight:
            return n_left_out
        if waiting:
            scheduler.submit(waiting.pop(0))
        while (due := scheduler.next_grammar()) is not None:
            scheduler.note_grammar(due.digest, rank.prepare(due))
        while (batch := scheduler.select()) is not None:
            in_flight.append((batch.iteration, rank.run(batch)))
            n_left_out += sum(not span.token_ids for span in batch.spans)
        if in_flight:
            scheduler.apply(*in_flight.pop(0))
        if cancelled is not None and len(cancelled.generated_token_ids) == 2:
            scheduler.cancel(cancelled)
    assert scheduler.kv_manager.n_allocated_slots == 0
    return n_left_out


def make_scheduler(policy: Policy, *, depth: int, token_hand_off: bool = True) -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=N_BLOCKS,
        block_size=4,
        pipeline_depth=depth,
        token_hand_off=token_hand_off,
        policy=policy,
    )


def run_alone(checkpoint: Path) -> list[list[int]]:
    """Returns the tokens of each of WANTS, run alone, as the paper runs it."""
    outputs: list[list[int]] = []
    for index, want in enumerate(WANTS):
        request = want.request(index)
        scheduler = make_scheduler(OrcaPolicy(max_batch_size=1), depth=1, token_hand_off=False)
        assert serve(Rank(checkpoint), scheduler, [request]) == 0
        outputs.append(list(request.generated_token_ids))
    assert [len(tokens) for tokens in outputs] == [want.max_new_tokens for want in WANTS]
    assert not any(has_word(outputs[-3], word) for word in BAD_WORDS)
    assert set(outputs[-2]) <= {3, 33, 60}
    assert set(outputs[-1]) == {6}
    return outputs


def has_word(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens)))


@pytest.fixture(name="alone", scope="module")
def make_alone(checkpoint: Path) -> list[list[int]]:
    return run_alone(checkpoint)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [OrcaPolicy(max_batch_size=4), ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)],
    ids=["orca", "chunked"],
)
def test_tokens_do_not_depend_on_policy_or_depth(
    checkpoint: Path, alone: list[list[int]], policy: Policy, depth: int
) -> None:
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    n_left_out = serve(Rank(checkpoint), make_scheduler(policy, depth=depth), requests)
    assert [list(request.generated_token_ids) for request in requests] == alone
    assert (n_left_out > 0) == (depth > 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_do_not_depend_on_recorded_graphs(
    checkpoint: Path, alone: list[list[int]], depth: int
) -> None:
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
    serve(Rank(checkpoint, has_graphs=True), make_scheduler(policy, depth=depth), requests)
    assert [list(request.generated_token_ids) for request in requests] == alone


def test_penalties_decide_about_tokens(checkpoint: Path, alone: list[list[int]]) -> None:
    for index, want in enumerate(WANTS):
        plain = replace(want, presence_penalty=0, frequency_penalty=0, repetition_penalty=1)
        request = plain.request(index)
        scheduler = make_scheduler(OrcaPolicy(max_batch_size=1), depth=1)
        serve(Rank(checkpoint), scheduler, [request])
        assert (list(request.generated_token_ids) == alone[index]) == (plain == want)


def test_who_stops_while_its_next_token_is_computed_disturbs_nobody(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    # The fifth token of each is its stop token; rows and blocks are used again by later ones.
    stops = [frozenset(tokens[4:5]) for tokens in alone]
    requests = [want.request(i, stops[i]) for i, want in enumerate(WANTS)]
    policy = ChunkedPolicy(max_batch_size=3, max_batch_tokens=9)
    serve(Rank(checkpoint), make_scheduler(policy, depth=2), requests)
    for request, tokens, stop in zip(requests, alone, stops, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
        if request is not requests[4]:
            assert list(request.generated_token_ids) == tokens[: end + 1]
    patient = list(requests[4].generated_token_ids)
    assert not stops[4] & set(patient[:3]), "min_tokens come before any stop token"


def test_who_is_cancelled_while_it_is_computed_disturbs_nobody(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    policy = OrcaPolicy(max_batch_size=3)
    scheduler = make_scheduler(policy, depth=2)
    serve(Rank(checkpoint), scheduler, requests, cancelled=requests[0])
    assert list(requests[0].generated_token_ids) == alone[0][:2]
    assert [list(request.generated_token_ids) for request in requests[1:]] == alone[1:]


def test_a_request_that_is_submitted_again_goes_on_where_it_was(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    want = WANTS[0]
    again = want.request(0)
    again.generated_token_ids.extend(alone[0][:4])
    ends = []
    scheduler = make_scheduler(ChunkedPolicy(max_batch_size=4, max_batch_tokens=4), depth=2)
    scheduler.submit(again)
    rank = Rank(checkpoint)
    in_flight: list[tuple[int, list[int]]] = []
    while len(scheduler.pool):
        while (batch := scheduler.select()) is not None:
            in_flight.append((batch.iteration, rank.run(batch)))
        ends += [update.finish_reason for update in scheduler.apply(*in_flight.pop(0))]
    assert list(again.generated_token_ids) == alone[0]
    assert ends[-1] is FinishReason.LENGTH
