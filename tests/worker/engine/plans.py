"""Plans as the engine master sends them, for tests of ranks and of whole stages."""

from collections.abc import Sequence

from orcinus.v1 import worker_pb2
from orcinus.v1.sampling_pb2 import SamplingParams


def prefill(
    prompt: Sequence[int], *, epoch: int, block: int = 0
) -> worker_pb2.RunIterationsRequest:
    """Returns the plan of the first iteration of pipeline `p`: the prompt of a greedy request, in
    one block."""
    return worker_pb2.RunIterationsRequest(
        pipeline_id="p",
        epoch=epoch,
        iteration=1,
        admissions=[
            worker_pb2.Admission(
                row=0, n_prompt_tokens=len(prompt), sampling=SamplingParams(temperature=0)
            )
        ],
        row=[0],
        start_position=[0],
        n_tokens=[len(prompt)],
        sample=[True],
        n_new_blocks=[1],
        token_on_rank=[False],
        token_ids=prompt,
        new_block_ids=[block],
    )


def decode(tokens: Sequence[int], *, epoch: int) -> worker_pb2.RunIterationsRequest:
    """Returns the plan of the second iteration of the request of `prefill`: it runs the last of
    `tokens`, in the same block."""
    return worker_pb2.RunIterationsRequest(
        pipeline_id="p",
        epoch=epoch,
        iteration=2,
        row=[0],
        start_position=[len(tokens) - 1],
        n_tokens=[1],
        sample=[True],
        n_new_blocks=[0],
        token_on_rank=[False],
        token_ids=tokens[-1:],
    )
