"""Keys and values that outlive their process are the bits that a new computation writes."""

import fcntl
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from orcinus.v1 import worker_pb2
from orcinus.v1.sampling_pb2 import SamplingParams
from torch import Tensor

from kernels.native.library import runnable
from services.scheduler.core.batch import Batch
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.pipeline.plan import plan_of
from services.worker.engine.kv_file import KVFile
from services.worker.engine.model_runner import ModelRunner
from services.worker.models import StageModel
from services.worker.rank import wire
from tests.checkpoints import write_checkpoint
from tests.fakes import describe_stage
from tests.scheduler.core.workload import build
from tests.worker.pipeline import load

GREEDY = SamplingParams(temperature=0).SerializeToString()
N_BLOCKS, BLOCK_SIZE, N_STAGES = 64, 4, 2
PLACE = Pipeline("p", 1, (Member("stage:1", describe_stage()),))


class Stages:
    """The stages of a pipeline in one epoch, whose memory is in files if there is a directory."""

    def __init__(self, models: Sequence[StageModel], directory: Path | None) -> None:
        self._files: list[KVFile] = []
        if directory is not None:
            for index in range(N_STAGES):
                stage = f"{index:016x}"
                path = directory / str(index)
                file = KVFile.open(path, stage=stage, rank=0, n_bytes=2**18)
                file.begin(N_BLOCKS)
                self._files.append(file)
        self._runners = [
            ModelRunner(
                model,
                n_kv_blocks=N_BLOCKS,
                block_size=BLOCK_SIZE,
                allocate_kv=self._files[index].allocate if self._files else None,
            )
            for index, model in enumerate(models)
        ]

    def run(self, batch: Batch, *, n_stages: int = N_STAGES) -> list[int]:
        """Runs a batch on all stages, or on the first ones only. Returns the tokens."""
        data = plan_of(batch, PLACE).SerializeToString()
        hidden: Tensor | None = None
        tokens: list[int] = []
        for index, runner in enumerate(self._runners[:n_stages]):
            plan = wire.plan_of(worker_pb2.RunIterationsRequest.FromString(data))
            inputs = runner.prepare(plan)
            if index + 1 < N_STAGES:
                hidden = runner.forward(inputs, hidden)
            else:
                tokens = runner.sample(inputs, runner.logits(inputs, hidden)).tolist()
        return tokens

    def stored(self, block_ids: list[int], n_tokens: int) -> list[Tensor]:
        """Returns the keys and values of the first tokens of a sequence, of each layer."""
        return [
            part[block_ids].flatten(0, 1)[:n_tokens].clone()
            for runner in self._runners
            for layer in runner.storage.kv.layers
            for part in layer
        ]

    def end(self) -> None:
        """Lets go of the files, as processes do that end."""
        for file in self._files:
            fcntl.flock(file._fd, fcntl.LOCK_UN)


def core() -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=N_BLOCKS,
        block_size=BLOCK_SIZE,
        pipeline_depth=2,
        has_prefix_cache=True,
        policy=ChunkedPolicy(max_batch_size=4, max_batch_tokens=9),
    )


def requests_of() -> list[Request]:
    source = random.Random(3)
    lengths = (3, 30, 6, 17)
    return [
        Request(RequestId(str(index)), source.choices(range(3, 60), k=length), 14, sampling=GREEDY)
        for index, length in enumerate(lengths)
    ]


def serve(stages: Stages, scheduler: Scheduler, *, n_batches: int = 1000) -> list[Batch]:
    """Runs batches to the end, or only some. Returns the batches that were sent and did not
    return."""
    in_flight: list[Batch] = []
    while len(scheduler.pool):
        while n_batches and (batch := scheduler.select()) is not None:
            n_batches -= 1
            in_flight.append(batch)
        if not n_batches:
            return in_flight
        oldest = in_flight.pop(0)
        scheduler.apply(oldest.iteration, stages.run(oldest))
    return in_flight


@pytest.fixture(name="models", scope="module")
def make_models(tmp_path_factory: pytest.TempPathFactory) -> list[StageModel]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model"))
    return [load(checkpoint, stage_index=i, n_stages=N_STAGES) for i in range(N_STAGES)]


def computed_again(models: Sequence[StageModel], request: Request, n_tokens: int) -> list[Tensor]:
    """Returns the keys and values of a sequence, from one prefill in new memory."""
    stages, scheduler = Stages(models, None), core()
    known = request.span(0, request.n_tokens)
    again = Request(RequestId("again"), known, 1)
    scheduler.submit(again)
    block_ids: list[int] = []
    while len(scheduler.pool):
        batch = scheduler.select()
        assert batch is not None
        tokens = stages.run(batch)
        block_ids += batch.spans[0].new_block_ids
        scheduler.apply(batch.iteration, tokens)
    return stages.stored(block_ids, n_tokens)


@pytest.mark.skipif(not runnable(), reason="the native library is not built")
@pytest.mark.parametrize("n_batches", [5, 14])
def test_kept_keys_and_values_are_the_bits_of_a_new_computation(
    tmp_path: Path, models: Sequence[StageModel], n_batches: int
) -> None:
    undisturbed, lost = requests_of(), requests_of()
    plain = core()
    for request in undisturbed:
        plain.submit(request)
    with torch.inference_mode():
        serve(Stages(models, None), plain)
        stages, scheduler = Stages(models, tmp_path), core()
        for request in lost:
            scheduler.submit(request)
        for batch in serve(stages, scheduler, n_batches=n_batches):
            stages.run(batch, n_stages=1)  # the first stage goes on, the second is gone
        stages.end()
        begun, _ = scheduler.suspend()
        assert begun
        stages, following = Stages(models, tmp_path), core()
        n_kept = 0
        for request in begun:
            found = scheduler.kv_manager.prefix_cache.find(request)
            rest = [] if found.rest is None else [found.rest]
            n_tokens = found.n_columns * BLOCK_SIZE + sum(each.n_tokens for each in rest)
            blocks = [*found.block_ids, *(each.block_id for each in rest)]
            kept = stages.stored(blocks, n_tokens)
            for one, other in zip(kept, computed_again(models, request, n_tokens), strict=True):
                assert one.numel() == 0 or one.any()
                assert torch.equal(one, other)
            n_kept += n_tokens
        assert n_kept > 8
        following.pool = scheduler.pool
        following.resume(scheduler)
        following.adopt()
        serve(stages, following)
    assert following.kv_manager.prefix_cache.n_cached_tokens >= n_kept
    assert [list(one.generated_token_ids) for one in lost] == [
        list(one.generated_token_ids) for one in undisturbed
    ]
