"""Settings of the tuner."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, model_validator
from pydantic_settings import NoDecode

from services.common.settings import ServiceSettings
from services.local.settings import Options
from simulator.workload import OUTPUT_TOKENS, PROMPT_TOKENS

MAX_TOKENS = 2**24
"""Largest number of tokens of a prompt or an output that may be set: more than any model's
context."""
_BOUNDS = re.compile(r"(\d+)(?:-(\d+))?")


def _bounds_in(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = _BOUNDS.fullmatch(value)
    if found is None:
        raise ValueError("must be a number, or two like 32-512")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"must be from 1 to {MAX_TOKENS}, the smaller one first")
    return low, high


Bounds = Annotated[tuple[int, int], NoDecode, BeforeValidator(_bounds_in)]
"""The shortest and the longest length in tokens; all lengths in between are equally likely."""


class TuneSettings(ServiceSettings):
    """Settings of the tuner, from `ORCINUS_*` variables or the command line."""

    model: Path
    """Directory of the checkpoint, with config.json, weights and a tokenizer, or a GGUF file."""

    out: Path = Path("build/tuned")
    """Directory for the files with the settings that were found. Created if it does not exist."""

    budget_s: float = Field(default=170.0, ge=20, allow_inf_nan=False)
    """Seconds that the tuner may take in all, approximately. With less time, fewer layouts are
    tried and fewer settings are run."""

    requests: int = Field(default=128, ge=1, le=1024)
    """Number of requests of the workload for which settings are found."""

    prompt_tokens: Bounds = PROMPT_TOKENS
    """Number of tokens of a prompt: one number for all prompts, or bounds like `32-512`."""

    output_tokens: Bounds = OUTPUT_TOKENS
    """Number of tokens of an output: one number for all outputs, or bounds like `1-128`."""

    trace: Path | None = None
    """CSV file of a public trace from which the lengths of prompts and outputs are taken. When not
    set, lengths are sampled between the bounds."""

    trace_format: Literal["azure", "burstgpt"] = "azure"
    """Format of the trace."""

    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Rate at which requests arrive, in requests per second, as a Poisson process. When not set,
    all requests arrive at once; with latency limits, the highest rate that keeps the limits is
    searched."""

    ttft_p99_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Limit in seconds on the time to the first token, which 99 of 100 requests must keep. When
    set, the goal is goodput: requests per second that keep all limits."""

    tpot_p99_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Limit in seconds on the mean time for each token after the first, which 99 of 100 requests
    must keep. When set, the goal is goodput, too."""

    seed: int = Field(default=0, ge=0)
    """Seed of the workload."""

    max_ranks: int = Field(default=8, ge=1)
    """Largest number of ranks, which is the number of stages times the ranks of a stage. If
    `worker` selects another device than the CPU, set this to the number of such devices."""

    max_kv_memory: Annotated[ByteSize, Field(ge=1)] | None = None
    """Largest memory for keys and values of all ranks together, in bytes or like `4GiB`. When not
    set, it is half of the memory that is left on the machine or in the container."""

    load_format: Literal["safetensors", "random"] = "safetensors"
    """Source of the weights, as in the setting `load_format` of `services.local`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of weights and K/V."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Quantization of matrices when they are loaded."""

    worker: Options = ()
    """Further settings of every worker, NAME=VALUE, as in the setting `worker` of
    `services.local`."""

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.trace is not None and not self.trace.is_file():
            raise ValueError(f"trace: there is no file {self.trace}")
        return self
