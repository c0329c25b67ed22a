"""transformers' `generate`, one padded batch at a time: the usual form of request-level batching.

A batch takes up to `--max-batch-size` of the waiting requests, pads their prompts to the longest
prompt and generates as many tokens as the longest output has. No request joins a running batch, and
all its requests return when the batch is complete. With `--microbatch-size`, the second parameter
of the paper's baseline, the batch is computed in parts of that size. Each part is padded
separately, and the batch still returns as a whole.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.protocol import Pipe, TokenIds, adapter_options, serve

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class StaticEngine:
    """transformers' model, and the requests that wait for a batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self.settings: dict[str, Any] = {
            "dtype": options.dtype,
            "max_batch_size": options.max_batch_size,
            "microbatch_size": options.microbatch_size or options.max_batch_size,
        }
        dtype = DTYPES[options.dtype]
        self._model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        self._model.generation_config.eos_token_id = None  # nothing ends a text but its length
        self._waiting: deque[tuple[int, TokenIds, int]] = deque()

    def submit(self, index: int, prompt_token_ids: TokenIds, n_output: int) -> None:
        self._waiting.append((index, prompt_token_ids, n_output))

    def step(self) -> dict[int, TokenIds]:
        n_requests = min(len(self._waiting), self.settings["max_batch_size"])
        batch = [self._waiting.popleft() for _ in range(n_requests)]
        size = self.settings["microbatch_size"]
        news: dict[int, TokenIds] = {}
        for begin in range(0, n_requests, size):
            news |= self._generate(batch[begin : begin + size])
        return news

    def _generate(self, batch: Sequence[tuple[int, TokenIds, int]]) -> dict[int, TokenIds]:
        """Generates tokens for one batch until the longest output is complete. Returns the tokens
        of each request by its index; shorter outputs are cut."""
        width = max(len(prompt) for _, prompt, _ in batch)
        padding = [width - len(prompt) for _, prompt, _ in batch]
        rows = [
            [0] * n_padding + list(prompt)
            for n_padding, (_, prompt, _) in zip(padding, batch, strict=True)
        ]
        is_token = [[int(column >= n_padding) for column in range(width)] for n_padding in padding]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(is_token),
                do_sample=False,
                max_new_tokens=max(n_output for _, _, n_output in batch),
                pad_token_id=0,
            )
        generated = output[:, width:].tolist()
        return {
            index: tokens[:n_output]
            for (index, _, n_output), tokens in zip(batch, generated, strict=True)
        }


def main() -> None:
    parser = adapter_options(__doc__, dtypes=DTYPES, max_batch_size=16)
    parser.add_argument("--microbatch-size", type=int, help="default: the batch's")
    pipe = Pipe()
    serve(pipe, StaticEngine(parser.parse_args()))


if __name__ == "__main__":
    main()
