"""Plans of the engine master, as bytes of the wire, up to the batch that kernels are given."""

import numpy as np
import torch
from google.protobuf.message import DecodeError
from orcinus.v1 import sampling_pb2, worker_pb2

from kernels import TORCH
from kernels.upload import Uploads
from services.worker.engine.input_batch import BatchBuilder
from services.worker.engine.plan import PlanError
from services.worker.engine.request_table import RequestTable
from services.worker.rank.wire import plan_of
from tests.fuzz.coverage.target import Choices, Target, any_bytes

N_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, MAX_MODEL_LEN = 8, 4, 32, 24


def plan(**columns: object) -> worker_pb2.RunIterationsRequest:
    """Returns a plan that admits a row and runs its prompt, with other `columns` if given."""
    sampling = sampling_pb2.SamplingParams(
        temperature=0.5, min_tokens=3, stop_token_ids=[1, 2], repetition_penalty=1.5
    )
    admission = worker_pb2.Admission(row=0, n_prompt_tokens=5, sampling=sampling)
    first = {
        "admissions": [admission], "row": [0], "start_position": [0], "n_tokens": [5],
        "sample": [True], "token_on_rank": [False], "n_new_blocks": [2],
        "token_ids": [1, 2, 3, 4, 5], "new_block_ids": [6, 1],
    }  # fmt: skip
    return worker_pb2.RunIterationsRequest(**(first | columns))  # type: ignore[arg-type]


NEXT = plan(
    admissions=[], start_position=[5], n_tokens=[1], token_on_rank=[True], n_new_blocks=[0],
    token_ids=[], new_block_ids=[],
)  # fmt: skip
COLUMNS = ("row", "start_position", "n_tokens", "n_new_blocks", "token_ids", "new_block_ids")


def run(data: bytes) -> None:
    """Runs two plans, one of which is random, and checks every index that kernels use."""
    choices = Choices(data)
    messages = [plan(), NEXT]
    place = choices.number(3)
    if place == 2:
        try:
            messages[choices.number(2)] = worker_pb2.RunIterationsRequest.FromString(data[2:])
        except DecodeError:
            return
    else:
        messages[place] = _changed(messages[place], choices)
    table = RequestTable(
        n_kv_blocks=N_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )
    builder = BatchBuilder(
        table,
        ops=TORCH,
        key_caches=[torch.zeros(N_BLOCKS + 1, BLOCK_SIZE, 1, 2)],
        n_heads=1,
        uploads=Uploads(),
        vocab_size=VOCAB_SIZE,
    )
    for message in messages:
        try:
            batch = builder.build(table.apply(plan_of(message)))
        except PlanError:
            return
        n_tokens = len(batch.token_ids)
        _check_within(batch.token_ids, VOCAB_SIZE)
        _check_within(batch.positions, MAX_MODEL_LEN)
        _check_within(batch.kv[0].slots, N_BLOCKS * BLOCK_SIZE)
        _check_within(batch.sampled_tokens, n_tokens)
        _check_within(batch.sampling.banned_ids, VOCAB_SIZE)
        if batch.counted is not None:
            _check_within(batch.counted.prompt_tokens, n_tokens)
            _check_within(batch.counted.generated_tokens, n_tokens)
            table.count(batch.token_ids, batch.counted)
        table.keep_tokens(batch.sampled_rows, np.zeros(batch.n_sampled, np.int64))


def _changed(
    message: worker_pb2.RunIterationsRequest, choices: Choices
) -> worker_pb2.RunIterationsRequest:
    changed = worker_pb2.RunIterationsRequest()
    changed.CopyFrom(message)
    for _ in range(1 + choices.number(3)):
        column = getattr(changed, choices.one_of(COLUMNS))
        value = choices.one_of([0, 1, 2, 5, 6, 31, 32, 65535, 65536, 2**31, 2**32 - 1])
        if column and choices.number(4):
            column[choices.number(len(column))] = value
        else:
            column.append(value)
    for admission in changed.admissions:
        if choices.number(2):
            admission.row = choices.one_of([0, 1, 65535, 65536, 2**32 - 1])
            admission.n_prompt_tokens = choices.one_of([5, 0, 1, 2**32 - 1])
            admission.sampling.stop_token_ids.append(choices.one_of([0, -1, -(2**31), 2**31 - 1]))
            admission.sampling.min_tokens = choices.one_of([9, 0, -1, 2**31 - 1])
            admission.sampling.temperature = choices.one_of([1.0, 0.0, -1.0, float("nan")])
    return changed


def _check_within(places: torch.Tensor, limit: int) -> None:
    assert not len(places) or (places.min() >= 0 and places.max() < limit), (places, limit)


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\0"),
        *any_bytes(b"\1"),
        *(bytes([2, which]) + plan().SerializeToString() for which in (0, 1)),
        *(bytes([place, 0, column, value, 1, 0]) for place in (0, 1) for column in range(6)
          for value in (0, 1, 5, 9)),
        *(bytes([0, 0, 0, 0, 0, 1, row, 0, stop, 0, 0]) for row in (0, 2) for stop in range(4)),
    ],
)  # fmt: skip
