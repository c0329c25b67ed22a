"""Tokens and logits are the same bits whether the beginning of a sequence is computed or was found
in the prefix cache."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from orcinus.v1 import sampling_pb2, worker_pb2
from torch import Tensor
from transformers import PreTrainedConfig

from kernels.native.library import runnable
from services.common.sampling import SamplingParams
from services.common.sampling_proto import to_proto
from services.grammar.grammars import Grammars
from services.scheduler.core.batch import Batch
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.pipeline.plan import plan_of
from services.worker.engine.plan import Admission, PlanError
from services.worker.engine.request_table import RequestTable
from services.worker.rank import wire
from tests.checkpoints import SMALL, write_checkpoint, write_family_checkpoint
from tests.fakes import describe_stage
from tests.grammar.compiled import digest_of
from tests.kernels.rows import threads
from tests.scheduler.core.workload import build
from tests.worker.engine.test_constraints import EOS, GRAMMAR
from tests.worker.engine.test_constraints import make_grammars as make_grammars
from tests.worker.engine.test_constraints import make_tokenizer_file as make_tokenizer_file
from tests.worker.engine.test_determinism import FAMILIES, SAMPLINGS, VOCAB_SIZE
from tests.worker.engine.test_scheduled_runs import N_BLOCKS, Rank, serve
from tests.worker.pipeline import Stage

WITHOUT_STATES = {
    name: config
    for name, config in FAMILIES.items()
    if not name.startswith(("qwen3-next", "qwen3.5"))
}
"""Families whose layers keep no state of a request, which is in no block."""
STEM = random.Random(0).choices(range(VOCAB_SIZE), k=90)


def scheduler_of(
    policy: Policy,
    *,
    has_cache: bool,
    depth: int,
    hand_off: bool,
    windows: tuple[int | None, ...] = (None,),
) -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=N_BLOCKS,
        block_size=4 if hand_off else 16,
        pipeline_depth=depth,
        token_hand_off=hand_off,
        policy=policy,
        has_prefix_cache=has_cache,
        groups=BlockGroups(windows, policy.max_span_tokens),
    )


class Stages:
    """All stages of a model, and the logits from which each request's tokens were sampled."""

    def __init__(self, directory: Path, *, n_stages: int, dtype: str) -> None:
        self._stages = [
            Stage(
                directory,
                index,
                n_stages,
                tp_size=1,
                dtype=dtype,
                load_format="safetensors",
                quantization="none",
                n_kv_blocks=N_BLOCKS,
                block_size=16,
            )
            for index in range(n_stages)
        ]
        self.windows = self._stages[0].windows
        described = describe_stage()
        described.kv_windows.extend([window or 0 for window in self.windows])
        self._place = Pipeline("p", 1, (Member("stage:1", described),))
        self.logits: dict[RequestId, list[Tensor]] = {}

    def run(self, batch: Batch) -> list[int]:
        data = plan_of(batch, self._place).SerializeToString()
        plan = wire.plan_of(worker_pb2.RunIterationsRequest.FromString(data))
        hidden = None
        for stage in self._stages[:-1]:
            (hidden,) = stage.run(plan, hidden)
        sampled, logits, *_ = self._stages[-1].run(plan, hidden)
        requests = [span.request.request_id for span in batch.spans if span.is_sampled]
        for request_id, of_token in zip(requests, logits, strict=True):
            self.logits.setdefault(request_id, []).append(of_token)
        tokens: list[int] = sampled.tolist()
        return tokens


def conversation(turn: int, before: Sequence[Request]) -> list[Request]:
    """Requests of one turn, with every kind of sampling; later ones go on from earlier answers."""
    requests = []
    for index, sampling in enumerate(SAMPLINGS):
        said = [] if not before else before[index].span(len(STEM), before[index].n_tokens)
        said = said[: -3 if turn % 2 else None]
        own = random.Random(f"{turn} {index}").choices(range(VOCAB_SIZE), k=3 + 5 * index)
        prompt = [*STEM, *said, *own]
        requests.append(
            Request(
                RequestId(f"{turn}-{index}"),
                prompt,
                6,
                sampling=to_proto(sampling).SerializeToString(),
            )
        )
    return requests


def run_all(
    stages: Stages, policy: Policy, *, has_cache: bool, depth: int
) -> tuple[list[list[int]], int]:
    """Runs three turns; returns the tokens of all requests, and how many were not computed."""
    scheduler = scheduler_of(
        policy, has_cache=has_cache, depth=depth, hand_off=False, windows=stages.windows
    )
    tokens: list[list[int]] = []
    requests: list[Request] = []
    for turn in range(3):
        requests = conversation(turn, requests)
        waiting, in_flight = list(requests), []
        while waiting or len(scheduler.pool):
            if waiting:
                scheduler.submit(waiting.pop(0))
            while (batch := scheduler.select()) is not None:
                in_flight.append((batch.iteration, stages.run(batch)))
            scheduler.apply(*in_flight.pop(0))
        tokens += [list(request.generated_token_ids) for request in requests]
    return tokens, scheduler.kv_manager.prefix_cache.n_cached_tokens


def check(directory: Path, dtype: str) -> None:
    one = Stages(directory, n_stages=1, dtype=dtype)
    plain, n_cached = run_all(one, OrcaPolicy(max_batch_size=4), has_cache=False, depth=1)
    assert n_cached == 0
    two = Stages(directory, n_stages=2, dtype=dtype)
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=40)
    cached, n_cached = run_all(two, policy, has_cache=True, depth=2)
    assert n_cached > 1000, "the beginnings of fourteen of fifteen prompts"
    if all(window is None for window in two.windows):
        assert n_cached % 16, "last blocks of answers were written on"
    assert cached == plain
    assert two.logits.keys() == one.logits.keys()
    for request_id, logits in one.logits.items():
        pairs = zip(logits, two.logits[request_id], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), request_id


@pytest.mark.skipif(not runnable(), reason="the native library is not built")
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3"])
def test_logits_are_the_same_bits(tmp_path: Path, family: str) -> None:
    with threads(1):
        check(write_family_checkpoint(tmp_path, FAMILIES[family]), "bfloat16")


@pytest.mark.thorough
@pytest.mark.skipif(not runnable(), reason="the native library is not built")
@pytest.mark.parametrize("config", WITHOUT_STATES.values(), ids=WITHOUT_STATES.keys())
def test_logits_of_every_family_are_the_same_bits(tmp_path: Path, config: PreTrainedConfig) -> None:
    check(write_family_checkpoint(tmp_path, config), "bfloat16")


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SEEDED,
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "all penalties": {**SEEDED, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "grammar": {"grammar": GRAMMAR, "stop_token_ids": [EOS], **SEEDED},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [EOS], "logit_bias": {EOS: 100}},
}


@pytest.mark.parametrize("has_graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_that_look_at_earlier_tokens_see_those_that_were_not_computed(
    checkpoint: Path, grammars: Grammars, options: dict[str, Any], has_graphs: bool
) -> None:
    prompt = [*range(20, 33), *range(20, 29)]
    sampling = sampling_pb2.SamplingParams(**{"temperature": 0.0, **options})
    grammar = sampling.grammar
    sampling.ClearField("grammar")

    def request(generated: Sequence[int] = ()) -> Request:
        return Request(
            RequestId("r"),
            prompt,
            20,
            sampling=sampling.SerializeToString(),
            grammar=grammar.encode(),
            grammar_digest=digest_of(grammar) if grammar else None,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            generated_token_ids=array(TOKEN_ID, generated),
        )

    first = request()
    rank = Rank(checkpoint, grammars=grammars, has_graphs=has_graphs)
    scheduler = scheduler_of(
        ChunkedPolicy(max_batch_size=4, max_batch_tokens=7), has_cache=True, depth=2, hand_off=True
    )
    serve(rank, scheduler, [first])
    assert first.n_cached_tokens == 0
    expected = list(first.generated_token_ids)
    again, going_on = request(), request(expected[:6])
    serve(rank, scheduler, [again, going_on])
    assert again.n_cached_tokens == 20
    assert going_on.n_cached_tokens == 24
    assert list(again.generated_token_ids) == list(going_on.generated_token_ids) == expected


def test_stored_tokens_that_no_model_has_are_refused() -> None:
    table = RequestTable(
        n_kv_blocks=4, block_size=4, vocab_size=SMALL["vocab_size"], max_model_len=16
    )
    admission = Admission(0, 9, SamplingParams(temperature=0), stored_token_ids=[5, -1, 5, 5])
    with pytest.raises(PlanError, match="stored_token_ids"):
        table._admit(admission)
