"""All stages of a model in one process, driven plan by plan, with a naive block allocator.

Blocks are handed out in a shuffled order, so that no test passes because blocks happen to lie one
after the other.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from services.worker.input_batch import Admission, IterationPlan, SamplingParams
from services.worker.model_runner import ModelRunner
from services.worker.models import StageModel, load_stage

GREEDY = SamplingParams(
    temperature=0, top_k=0, top_p=1, min_p=0, seed=0, min_tokens=0, stop_token_ids=()
)


def load(
    directory: Path, *, stage_index: int = 0, n_stages: int = 1, dtype: str = "auto"
) -> StageModel:
    """A stage on the CPU, read without anybody listening to its progress."""
    return load_stage(
        directory,
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=0,
        tp_size=1,
        dtype=dtype,
        device=torch.device("cpu"),
        on_progress=lambda n_done, n_total: None,
    )


@dataclass
class Stored:
    """What the driver remembers of a request."""

    n_stored: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """Tokens of one request that run in one iteration."""

    row: int
    token_ids: Sequence[int]
    sample: bool = True


class Pipeline:
    """Stages chained in one process."""

    def __init__(
        self,
        directory: Path,
        *,
        n_stages: int = 1,
        dtype: str = "auto",
        n_kv_blocks: int = 64,
        block_size: int = 4,
    ) -> None:
        self._runners = [
            ModelRunner(
                load(directory, stage_index=i, n_stages=n_stages, dtype=dtype),
                n_kv_blocks=n_kv_blocks,
                block_size=block_size,
            )
            for i in range(n_stages)
        ]
        self._block_size = block_size
        self._free_blocks = list(range(n_kv_blocks))
        random.Random(n_kv_blocks).shuffle(self._free_blocks)
        self._sequences: dict[int, Stored] = {}
        self._admissions: list[Admission] = []
        self._released_rows: list[int] = []
        self._iteration = 0

    def admit(self, row: int, n_prompt_tokens: int, sampling: SamplingParams = GREEDY) -> None:
        """Announces a request with the next iteration."""
        self._sequences[row] = Stored()
        self._admissions.append(Admission(row, n_prompt_tokens, sampling))

    def release(self, row: int) -> None:
        """Gives a request's row and blocks up with the next iteration."""
        self._free_blocks += self._sequences.pop(row).blocks
        self._released_rows.append(row)

    def run(self, spans: Sequence[Span]) -> tuple[list[int], Tensor]:
        """Runs one iteration: the sampled tokens and their logits [n_sampled, vocab_size]."""
        plan = self._plan(spans)
        hidden = None
        for runner in self._runners:
            batch = runner.prepare(plan)
            hidden = runner.forward(batch, hidden)
        assert hidden is not None
        return runner.sample(batch, hidden).tolist(), runner.logits(batch, hidden)

    def _plan(self, spans: Sequence[Span]) -> IterationPlan:
        start_positions = [self._sequences[span.row].n_stored for span in spans]
        new_blocks = [self._allocate(span) for span in spans]
        self._iteration += 1
        plan = IterationPlan(
            iteration=self._iteration,
            released_rows=self._released_rows,
            admissions=self._admissions,
            rows=[span.row for span in spans],
            start_positions=start_positions,
            n_tokens=[len(span.token_ids) for span in spans],
            sample=[span.sample for span in spans],
            n_new_blocks=[len(blocks) for blocks in new_blocks],
            token_ids=[token for span in spans for token in span.token_ids],
            new_block_ids=[block for blocks in new_blocks for block in blocks],
        )
        self._released_rows, self._admissions = [], []
        return plan

    def _allocate(self, span: Span) -> list[int]:
        sequence = self._sequences[span.row]
        sequence.n_stored += len(span.token_ids)
        n_missing = -(-sequence.n_stored // self._block_size) - len(sequence.blocks)
        new = [self._free_blocks.pop() for _ in range(n_missing)]
        sequence.blocks += new
        return new
