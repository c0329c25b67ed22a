"""Windows shorter than sequences: tokens are to the bit those of a model that keeps everything, and
`transformers`' own, while a request holds only what it still reads."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from orcinus.v1 import sampling_pb2, worker_pb2
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from kernels.upload import StagedUploads
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.pipeline.plan import plan_of
from services.worker.engine.model_runner import ModelRunner
from services.worker.models import StageModel
from services.worker.models.kv_groups import KVGroups as LayerGroups
from services.worker.rank import wire
from tests.checkpoints import SMALL, Oracle, write_family_checkpoint
from tests.fakes import describe_stage
from tests.worker.engine.fixed_shapes import CPU, RepeatedCall, load_fixed
from tests.worker.models.test_registry import SHAPES
from tests.worker.pipeline import load

BLOCK_SIZE = 4
LAYERS = {**SMALL, "num_hidden_layers": 4}
FIRST_TWO = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
MODELS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**LAYERS, head_dim=8, sliding_window=7),
    "ministral": MinistralConfig(**LAYERS, head_dim=8, sliding_window=9),
    "qwen2": Qwen2Config(
        **LAYERS, use_sliding_window=True, sliding_window=10, layer_types=FIRST_TWO
    ),
    "gemma3": Gemma3TextConfig(
        **{**LAYERS, "sliding_window_pattern": 4}, head_dim=8, sliding_window=6
    ),
    "gpt-oss": GptOssConfig(
        **LAYERS,
        head_dim=8,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "gemma3n": SHAPES["gemma3n"],  # whose last layers attend to what others store
}
WINDOWS = {
    "mistral": (7,),
    "ministral": (9,),
    "qwen2": (None, 10),
    "gemma3": (None, 6, 6, 6),
    "gpt-oss": (None, 8),
    "gemma3n": (None, 7),
}


@pytest.fixture(name="checkpoints", scope="module")
def make_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_family_checkpoint(tmp_path_factory.mktemp(name), config)
        for name, config in MODELS.items()
    }


class Stages:
    """The stages of a model in one process, with plans that have been on the wire."""

    def __init__(
        self, models: Sequence[StageModel], *, n_kv_blocks: int, has_graphs: bool = False
    ) -> None:
        described = describe_stage()
        windows = models[0].kv_groups.windows
        described.kv_windows.extend([window or 0 for window in windows])
        self.place = Pipeline("p", 1, (Member("stage:1", described),))
        self._runners = [
            ModelRunner(
                model,
                n_kv_blocks=n_kv_blocks,
                block_size=BLOCK_SIZE,
                new_graph=RepeatedCall if has_graphs else None,
                max_graph_batch_size=4,
                uploads=StagedUploads(CPU) if has_graphs else None,
            )
            for model in models
        ]
        # A read of a block before it is written, or after it is freed, changes the output.
        for runner in self._runners:
            for keys, values in runner.storage.kv.layers:
                keys.fill_(1e4)
                values.fill_(1e4)

    def run(self, data: bytes) -> list[int]:
        """Returns the sampled tokens of a plan."""
        hidden = None
        for runner in self._runners[:-1]:
            batch = runner.prepare(_parsed(data))
            hidden = runner.forward(batch, hidden)
        last = self._runners[-1]
        batch = last.prepare(_parsed(data))
        tokens: list[int] = torch.as_tensor(last.sample(batch, last.logits(batch, hidden))).tolist()
        return tokens


def _parsed(data: bytes) -> Any:
    return wire.plan_of(worker_pb2.RunIterationsRequest.FromString(data))


def requests_of(n: int = 6) -> list[Request]:
    """Requests of several windows' lengths; two begin alike."""
    requests = []
    for index in range(n):
        rng = random.Random(index // 2)
        n_prompt = (23, 37, 5)[index // 2 % 3] + index % 2
        prompt = rng.choices(range(3, 199), k=n_prompt)
        requests.append(
            Request(
                RequestId(str(index)),
                prompt,
                max_new_tokens=12 + 3 * index,
                stop_token_ids=frozenset({2}),
                sampling=sampling_pb2.SamplingParams(temperature=0, top_p=1).SerializeToString(),
                speculation=Speculation(),
            )
        )
    return requests


def serve(
    stages: Stages,
    requests: Sequence[Request],
    *,
    n_blocks: int,
    policy: Policy | None = None,
    depth: int = 2,
    hand_off: bool = True,
    has_prefix_cache: bool = True,
    is_optimistic: bool = False,
    max_drafts: int = 0,
) -> Scheduler:
    """Runs all to their ends, in spans of the policy; returns the core, whose memory is empty."""
    policy = policy or ChunkedPolicy(max_batch_size=4, max_batch_tokens=9)
    use = None
    if is_optimistic:
        use = ExpectedUse()
        use.share = 0.0
    scheduler = Scheduler(
        RequestPool(max_requests=99),
        KVManager(
            n_blocks=n_blocks,
            block_size=BLOCK_SIZE,
            groups=BlockGroups(
                stages.place.kv_windows, policy.max_span_tokens, max_drafts=max_drafts
            ),
            has_prefix_cache=has_prefix_cache,
            expected_use=use,
        ),
        policy=policy,
        pipeline_depth=depth,
        token_hand_off=hand_off,
        drafter=Drafter(max_drafts, max_batch_tokens=9) if max_drafts else None,
    )
    for request in requests:
        scheduler.submit(request)
    in_flight: list[tuple[int, list[int]]] = []
    while len(scheduler.pool) or in_flight:
        while (batch := scheduler.select()) is not None:
            data = plan_of(batch, stages.place).SerializeToString()
            in_flight.append((batch.iteration, stages.run(data)))
        scheduler.apply(*in_flight.pop(0))
    assert scheduler.kv_manager.n_allocated_blocks == 0
    return scheduler


def keeping(model: StageModel) -> StageModel:
    """Returns the model with one group, in which nothing is given back."""
    model.kv_groups = LayerGroups((None,), (0,) * model.config.n_layers)
    program = model.runner.program
    program.groups = ()
    model.runner = model.ops.runner(program)
    return model


def tokens_of(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.generated_token_ids) for request in requests]


Expected = Callable[[str, list[list[int]]], list[list[int]]]


@pytest.fixture(name="expected", scope="module")
def make_expected(checkpoints: dict[str, Path]) -> Expected:
    """Returns a function of the tokens of each request alone, as the oracle of a model continues
    its prompt. Its second argument are the tokens that these probably are."""
    known: dict[str, list[list[int]]] = {}

    def expected(name: str, guesses: list[list[int]]) -> list[list[int]]:
        if name not in known:
            oracle = Oracle(checkpoints[name])
            known[name] = [
                oracle.generate(list(request.prompt_token_ids), request.max_new_tokens, guess=guess)
                for request, guess in zip(requests_of(), guesses, strict=True)
            ]
        return known[name]

    return expected


# A model whole and another one in two stages; the other ways where there is time.
WAYS = [
    pytest.param(
        name,
        n_stages,
        marks=() if (name, n_stages) in {("gpt-oss", 1), ("gemma3n", 2)} else pytest.mark.thorough,
    )
    for name in MODELS
    for n_stages in (1, 2)
]


@pytest.mark.parametrize(("name", "n_stages"), WAYS)
def test_tokens_are_the_oracles_in_the_least_memory_that_there_can_be(
    name: str,
    n_stages: int,
    checkpoints: dict[str, Path],
    expected: Expected,
) -> None:
    models = [load(checkpoints[name], stage_index=i, n_stages=n_stages) for i in range(n_stages)]
    assert models[0].kv_groups.windows == WINDOWS[name]
    groups = BlockGroups(WINDOWS[name], max_span_tokens=9)
    longest = max(request.max_sequence_len for request in requests_of())
    n_blocks = groups.n_blocks(
        -(-longest // BLOCK_SIZE), groups.n_at_once(longest), block_size=BLOCK_SIZE
    )
    requests = requests_of()
    serve(
        Stages(models, n_kv_blocks=n_blocks),
        requests,
        n_blocks=n_blocks,
        depth=n_stages + 1,
        hand_off=n_stages == 1,
    )
    tokens = tokens_of(requests)
    assert tokens == expected(name, tokens)


OPTIONS: dict[str, dict[str, Any]] = {
    "orca": {"policy": OrcaPolicy(max_batch_size=4)},
    "one at a time": {"policy": ChunkedPolicy(max_batch_size=1, max_batch_tokens=3), "depth": 1},
    "no cache": {"has_prefix_cache": False},
    "optimistic": {"is_optimistic": True},
    "drafts": {"max_drafts": 4},
    "drafts and optimistic": {"max_drafts": 4, "is_optimistic": True},
    "deep": {"depth": 4},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mistral", marks=pytest.mark.thorough),
        pytest.param("qwen2", marks=pytest.mark.thorough),
        "gemma3",
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tokens_are_the_same_however_requests_are_run(
    name: str,
    options: dict[str, Any],
    checkpoints: dict[str, Path],
    expected: Expected,
) -> None:
    requests = requests_of()
    n_blocks = 17 + 13 * len(WINDOWS[name])
    serve(
        Stages([load(checkpoints[name])], n_kv_blocks=n_blocks),
        requests,
        n_blocks=n_blocks,
        **options,
    )
    tokens = tokens_of(requests)
    assert tokens == expected(name, tokens)


@pytest.mark.parametrize("name", ["gpt-oss"])
def test_tokens_are_the_same_where_decodes_are_recorded(
    name: str, checkpoints: dict[str, Path], expected: Expected
) -> None:
    requests = requests_of()
    stages = Stages([load_fixed(checkpoints[name])], n_kv_blocks=60, has_graphs=True)
    serve(stages, requests, n_blocks=60)
    tokens = tokens_of(requests)
    assert tokens == expected(name, tokens)


class Logits(Stages):
    """Stages that remember the logits from which tokens were sampled."""

    def __init__(self, models: Sequence[StageModel], *, n_kv_blocks: int) -> None:
        super().__init__(models, n_kv_blocks=n_kv_blocks)
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        """By the row of the request, and the position of the token."""

    def run(self, data: bytes) -> list[int]:
        plan = _parsed(data)
        batch = self._runners[0].prepare(plan)
        logits = self._runners[0].logits(batch, None)
        ends = [
            (row, start + n)
            for row, start, n, is_sampled in zip(
                plan.rows, plan.start_positions, plan.n_tokens, plan.sample, strict=True
            )
            if is_sampled
        ]
        for end, values in zip(ends, logits.values, strict=True):
            self.rows[end] = values.clone()
        tokens: list[int] = torch.as_tensor(self._runners[0].sample(batch, logits)).tolist()
        return tokens


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"gemma3", "gemma3n"} else pytest.mark.thorough)
        for name in MODELS
    ],
)
def test_logits_are_equal_to_the_bit_with_and_without_what_comes_back(
    name: str, checkpoints: dict[str, Path]
) -> None:
    found = []
    for model in (load(checkpoints[name]), keeping(load(checkpoints[name]))):
        stages = Logits([model], n_kv_blocks=200)
        serve(stages, requests_of(4), n_blocks=200, has_prefix_cache=False)
        found.append(stages.rows)
    ours, keeps = found
    assert ours.keys() == keeps.keys()
    assert all(torch.equal(ours[place], keeps[place]) for place in ours)


def test_a_longer_sequence_takes_no_more_memory_in_a_model_of_windows(
    checkpoints: dict[str, Path],
) -> None:
    model = load(checkpoints["mistral"])
    request = requests_of(1)[0]
    request.max_new_tokens = 200
    request.stop_token_ids = frozenset()
    scheduler = serve(Stages([model], n_kv_blocks=6), [request], n_blocks=6, has_prefix_cache=False)
    assert scheduler.kv_manager.n_slots == 24
    sequence = [*request.prompt_token_ids, *request.generated_token_ids]
    logits = Oracle(checkpoints["mistral"]).logits(sequence[:-1])
    assert logits[request.n_prompt_tokens - 1 :].argmax(-1).tolist() == sequence[-200:]
