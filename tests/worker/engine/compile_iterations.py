"""Compiles what a rank compiles before requests come, and then what iterations need beside that.

    python -m tests.worker.engine.compile_iterations CHECKPOINT

For an absent GPU, see `tests.kernels.triton.compile_only`. Says in JSON which kernels were
compiled by the warm-up, and which later: there should be none.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from kernels import triton_ops
from services.worker.engine.trial_iteration import SAMPLED_PENALIZED, TrialIteration
from services.worker.engine.warm_up import compile_kernels
from tests.kernels.triton.compile_only import Compiler
from tests.worker.engine.fixed_shapes import RepeatedCall, load_fixed
from tests.worker.pipeline import GREEDY

BLOCK_SIZE = 16
SAMPLED = replace(GREEDY, temperature=1, seed=0)


def main() -> None:
    compiler = Compiler(90)
    ops = triton_ops()
    assert ops is not None
    model = load_fixed(Path(sys.argv[1]), ops=ops, dtype=torch.bfloat16)
    longest = model.config.max_position_embeddings

    def iterations() -> None:
        for lengths in ([1], [1] * 300, [longest], [longest, longest, 7, 1, 1], [3] * 21, [90, 1]):
            for sampling in (
                GREEDY,
                replace(GREEDY, min_tokens=2, stop_token_ids=(1,)),
                replace(GREEDY, frequency_penalty=1),
                replace(GREEDY, logit_bias=((0, 1.0),)),
                replace(GREEDY, bad_token_ids=(0,)),
                SAMPLED,
                replace(SAMPLED, top_k=3, top_p=0.5),
                replace(SAMPLED, bad_token_ids=(0,)),
                SAMPLED_PENALIZED,
                replace(SAMPLED_PENALIZED, frequency_penalty=0),
            ):
                for new_graph in (None, RepeatedCall):
                    TrialIteration(
                        model,
                        lengths,
                        block_size=BLOCK_SIZE,
                        sampling=sampling,
                        new_graph=new_graph,
                    ).run()

    def warm_up() -> None:
        compile_kernels(model, n_tokens=8192, block_size=BLOCK_SIZE, new_graph=RepeatedCall)

    compiled = {
        name: [kernel.kernel for kernel in compiler.call(name, call)]
        for name, call in (("warm_up", warm_up), ("iterations", iterations))
    }
    sys.stdout.write(json.dumps(compiled))


if __name__ == "__main__":
    main()
