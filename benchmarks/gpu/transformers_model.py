"""Measures `transformers` with the model of the other sections: padded batches, continuous
batching, and single decodes.

`generate` computes a batch until its longest answer is complete; only requested tokens are counted.
`continuous batching` is the implementation in transformers, with default settings. The weights are
random.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.serving import requests_of
from benchmarks.gpu.shapes import RMS_NORM_EPS, ROPE_THETA, ModelShape
from benchmarks.workload import PlannedRequest

SMALL_CACHE = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
N_DECODED = 16
"""Number of decoded tokens over which the time per token is averaged."""


def measure(bench: Bench) -> None:
    """Writes a row for the workload with `generate`, one with continuous batching, and one for each
    batch of decodes."""
    model = llama(bench.scale.model, bench)
    requests = requests_of(bench)
    name = f"{len(requests)} requests, all at once"
    bench.attempt(name, "generate", partial(_workload, static, model, requests))
    for batch, context in bench.scale.static_batches:
        work = partial(_decode, bench, model, batch, context)
        bench.attempt(f"decode {batch} of {context}", "generate", work)
        bench.release()
    # On a CPU it would take most of the memory there is.
    settings = None if bench.scale.kv_bytes is None else SMALL_CACHE
    way = partial(continuous, settings=settings)
    bench.attempt(name, "continuous batching", partial(_workload, way, model, requests))


def llama(shape: ModelShape, bench: Bench) -> Any:
    """Returns transformers' Llama of the given shape with random weights, which uses PyTorch's
    scaled dot product attention."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_tokens,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        eos_token_id=None,
    )
    make: Any = LlamaForCausalLM._from_config
    with torch.device(bench.device):
        model = make(config, attn_implementation="sdpa", dtype=bench.dtype)
    model.generation_config.eos_token_id = None  # nothing ends a text but its length
    model.generation_config.pad_token_id = 0
    return model.eval()


Serve = Callable[[Any, Sequence[PlannedRequest]], tuple[int, float]]
"""A function that serves requests with a model, and returns the number of output tokens and the
seconds."""


def static(model: Any, requests: Sequence[PlannedRequest]) -> tuple[int, float]:
    """Serves all requests in one batch, padded to the longest prompt, until the longest answer is
    complete. Returns the number of requested output tokens and the seconds."""
    start = time.perf_counter()
    width = max(request.n_prompt for request in requests)
    rows, mask = torch.zeros((2, len(requests), width), dtype=torch.int64)
    for row, is_token, request in zip(rows, mask, requests, strict=True):
        row[width - request.n_prompt :] = torch.tensor(request.prompt_token_ids)
        is_token[width - request.n_prompt :] = 1
    n_longest = max(request.n_output for request in requests)
    output = _generate(model, rows, mask, n_longest)
    if output.shape[1] != width + n_longest:
        raise RuntimeError(f"{output.shape[1] - width} tokens came where {n_longest} were wanted")
    n_output = sum(request.n_output for request in requests)
    return n_output, time.perf_counter() - start


def continuous(
    model: Any, requests: Sequence[PlannedRequest], *, settings: Any = None
) -> tuple[int, float]:
    """Serves requests with transformers' continuous batching, each with its own output length.
    Returns the number of output tokens and the seconds. The time begins when memory is allocated
    and the model has warmed up."""
    config: Any = GenerationConfig(
        max_new_tokens=max(request.n_output for request in requests),
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    n_output = n_finished = 0
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, block=True, timeout=5
    ) as manager:
        start = time.perf_counter()
        for request in requests:
            manager.add_request(list(request.prompt_token_ids), max_new_tokens=request.n_output)
        while n_finished < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the generation thread has ended")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                n_finished += 1
                n_output += len(result.generated_tokens)
        return n_output, time.perf_counter() - start


def _workload(serve: Serve, model: Any, requests: Sequence[PlannedRequest]) -> Row:
    """Runs the workload twice and returns a row with the results of the second run."""
    _, first_run_s = serve(model, requests)
    n_output, seconds = serve(model, requests)
    return {
        "seconds": seconds,
        "first_run_s": first_run_s,
        "n_output_tokens": n_output,
        "output_tokens_per_s": n_output / seconds,
    }


def _decode(bench: Bench, model: Any, batch: int, context: int) -> Row:
    """Returns a row with the seconds per token of a padded batch: the additional time for
    `N_DECODED` more tokens, divided by `N_DECODED`."""
    rows = torch.randint(1, bench.scale.model.vocab_size, (batch, context))
    mask = torch.ones_like(rows)

    def seconds(n_tokens: int) -> float:
        start = time.perf_counter()
        _generate(model, rows, mask, n_tokens)
        return time.perf_counter() - start

    seconds(2)
    more = [seconds(1 + N_DECODED) - seconds(1) for _ in range(2)]
    shape = bench.scale.model
    return {
        "seconds": statistics.median(more) / N_DECODED,
        "batch": batch,
        "context": context,
        "n_bytes": shape.iteration_bytes(batch * (context + 1), bench.dtype.itemsize),
        "n_flops": shape.iteration_flops(batch, batch, batch * (context + 1)),
    }


def _generate(model: Any, rows: Tensor, mask: Tensor, n_tokens: int) -> Tensor:
    output: Tensor = model.generate(
        rows.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        min_new_tokens=n_tokens,
        max_new_tokens=n_tokens,
    )
    return output.cpu()
