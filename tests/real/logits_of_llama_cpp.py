"""Computes logits of GGUF files with llama.cpp, whose Python bindings must be installed.

A line of standard input is a JSON object with `model`, the path of a GGUF file, and `tokens`. The
corresponding line of standard output has the logits after each of the tokens, or `error` if
llama.cpp does not load the file. Keys and values are stored in float32, so that they are not
rounded.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def logits_of(model: Any, tokens: Sequence[int]) -> list[list[float]]:
    """Returns the logits after each token, [n_tokens, vocab_size]."""
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("llama.cpp makes no context")
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for row, token in enumerate(tokens):
        batch.token[row], batch.pos[row] = token, row
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        batch.logits[row] = True
    if status := llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")
    pointers = [llama_cpp.llama_get_logits_ith(context, row) for row in range(len(tokens))]
    logits = [np.ctypeslib.as_array(pointer, (n_vocab,)).tolist() for pointer in pointers]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return logits


def answer(path: Path, tokens: Sequence[int]) -> dict[str, Any]:
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        return {"error": "llama.cpp does not load this file"}
    logits = logits_of(model, tokens)
    llama_cpp.llama_model_free(model)
    return {"logits": logits}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints goes elsewhere
    llama_cpp.llama_backend_init()
    for line in sys.stdin:
        request = json.loads(line)
        found = answer(Path(request["model"]), request["tokens"])
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
