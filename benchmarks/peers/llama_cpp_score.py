"""Scores texts with llama.cpp: reads windows of tokens from standard input, and writes their
log-probabilities to standard output.

An input line is a window, a JSON list of token ids. The corresponding output line is JSON with the
sum of the natural logarithms of the probabilities of all tokens but the first.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.llama_cpp import loaded
from benchmarks.peers.protocol import Pipe


class Scorer:
    """A llama.cpp model with a context for one sequence."""

    def __init__(self, path: Path, *, max_tokens: int, threads: int) -> None:
        self._model = loaded(path)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = max_tokens
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context: Any = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context of this size")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(max_tokens, 0, 1)

    def score(self, tokens: Sequence[int]) -> float:
        """Returns the sum of the log-probabilities of `tokens` without the first token."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = True
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return sum(self._logprob(row, token) for row, token in enumerate(tokens[1:]))

    def _logprob(self, row: int, token: int) -> float:
        """Returns the log-probability of `token` after the input row `row`."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(pointer, (self._n_vocab,)).astype(np.float64)
        largest = logits.max()
        return float(logits[token] - largest - np.log(np.exp(logits - largest).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--max-tokens", type=int, required=True, help="of a window")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    pipe = Pipe()  # what llama.cpp prints goes elsewhere
    scorer = Scorer(options.model, max_tokens=options.max_tokens, threads=options.threads)
    for line in sys.stdin:
        pipe.say({"logprob": scorer.score(json.loads(line))})


if __name__ == "__main__":
    main()
