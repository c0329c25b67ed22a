"""Two mixed batches through a tiny stage of random weights, with nothing but the engine core.

Imports no other part of the tests, since these need more than the core may.
"""

from __future__ import annotations

import torch

from services.common.sampling import SamplingParams
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import random_stage
from services.worker.models.families.llama import LlamaConfig
from services.worker.models.rotary_config import RopeConfig

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=72,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=10_000.0),
)


def sampled_tokens() -> list[list[int]]:
    """Returns the tokens of two iterations: two prompts and a part of one; then a decode, the rest
    of that part's prompt, and another prompt."""
    stage = random_stage(CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    runner = ModelRunner(stage, n_kv_blocks=16, block_size=4)
    first = IterationPlan(
        iteration=1,
        released_rows=[],
        admissions=[
            Admission(0, 5, _sampling(temperature=0)),
            Admission(1, 9, _sampling(temperature=1)),
            Admission(2, 3, _sampling(temperature=1)),
        ],
        rows=[0, 1, 2],
        start_positions=[0, 0, 0],
        n_tokens=[5, 6, 3],
        sample=[True, False, True],
        n_new_blocks=[2, 2, 1],
        token_on_rank=[False, False, False],
        token_ids=[*range(5), *range(20, 26), *range(40, 43)],
        new_block_ids=[7, 3, 0, 12, 5],
    )
    second = IterationPlan(
        iteration=2,
        released_rows=[2],
        admissions=[Admission(3, 4, _sampling(temperature=0))],
        rows=[0, 1, 3],
        start_positions=[5, 6, 0],
        n_tokens=[1, 3, 4],
        sample=[True, True, True],
        n_new_blocks=[0, 1, 1],
        token_on_rank=[True, False, False],
        token_ids=[*range(26, 29), *range(60, 64)],
        new_block_ids=[9, 5],
    )
    return [_run(runner, first), _run(runner, second)]


def _run(runner: ModelRunner, plan: IterationPlan) -> list[int]:
    batch = runner.prepare(plan)
    tokens: list[int] = runner.sample(batch, runner.logits(batch, None)).tolist()
    return tokens


def _sampling(*, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=0.9, seed=1)
