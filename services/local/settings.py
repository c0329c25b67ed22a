"""Settings of the local launcher; it passes them on to the services it starts."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from services.common.settings import ModelNames, ServiceSettings

_NEXT_OPTION = re.compile(r",(?=[a-z][a-z0-9_-]*=)")


def _options_in(value: object) -> object:
    if not isinstance(value, str):
        return value
    options = [option.partition("=") for option in _NEXT_OPTION.split(value)]
    for name, equals, _ in options:
        if not (name and equals):
            raise ValueError("must be NAME=VALUE")
    return tuple((name.replace("_", "-"), value) for name, _, value in options)


Options = Annotated[tuple[tuple[str, str], ...], NoDecode, BeforeValidator(_options_in)]
"""Settings of a service, `NAME=VALUE`, separated by commas or given one by one."""


class LocalSettings(ServiceSettings):
    """Settings of the local launcher, from `ORCINUS_*` variables or the command line."""

    model: Path
    """Directory of the checkpoint, config.json, safetensors, tokenizer.json, or a GGUF file."""

    served_model_name: ModelNames = ()
    """Names by which clients know the model, separated by commas or given one by one; by default
    the name of its directory or file."""

    stages: int = Field(default=1, ge=1)
    """Pipeline stages to cut the model into, a worker each."""

    tp: int = Field(default=1, ge=1)
    """Ranks that share each layer of a stage (tensor parallelism)."""

    load_format: Literal["safetensors", "random"] = "safetensors"
    """Where weights come from; `random` makes them up, so that config.json and the tokenizer are
    all that is needed. It is for benchmarks."""

    host: str = Field(default="127.0.0.1", pattern=r"^[^\s/]+$")
    """Address of this machine at which clients reach both APIs; `0.0.0.0` is all of them."""

    http_port: int = Field(default=8000, ge=0, lt=65536)
    """Port of the OpenAI API; 0 takes a free one."""

    grpc_port: int = Field(default=50051, ge=0, lt=65536)
    """Port of the gRPC API; 0 takes a free one."""

    api_keys_file: Path | None = None
    """JSON file with the keys that clients must show, see the frontend's setting; without it
    anybody who reaches `host` may call."""

    tls_dir: Path | None = None
    """Directory with `tls.crt` and `tls.key` for clients of both APIs; without it they speak in
    plaintext."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of weights and K/V; `auto` takes the checkpoint's."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """How matrices are quantized, see the worker's setting."""

    max_batch_size: int = Field(default=32, ge=1)
    """Requests in one batch at most."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Batches in flight at most; as many as there are stages, and at least two, when not set."""

    policy: Literal["orca", "chunked"] | None = None
    """How the scheduler fills batches; its own default when not set."""

    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one iteration at most (policy `chunked`); the scheduler's default when not set."""

    prefix_cache: bool = True
    """Whether requests that begin with the same tokens share their keys and values."""

    max_requests: int = Field(default=1024, ge=1)
    """Requests in the pool at most; more are refused with a retry delay."""

    kv_memory: Literal["auto"] | Annotated[ByteSize, Field(ge=1)] = ByteSize(2**29)
    """Memory for keys and values of each rank, in bytes or like `512MiB`; `auto` needs a GPU, and
    this launcher's ranks compute on CPUs."""

    iteration_limit_s: float = Field(default=900.0, gt=0)
    """Seconds after which a stage that has not finished an iteration counts as lost; must exceed
    the longest one. A stage that dies is noticed at once."""

    threads: int = Field(default=0, ge=0)
    """Compute threads of each rank; 0 divides the CPUs that may be used among all ranks."""

    page: bool = True
    """Whether the frontend serves a page at `/` that shows the pipeline at work. Without API keys,
    whoever reaches `host` may look."""

    fail_fast: bool = False
    """Whether everything ends with the first service that dies or hangs. Otherwise it is started
    again, up to five times in a minute."""

    metrics: bool = False
    """Whether each service serves `/metrics`, on a free port of loopback."""

    traced_iterations_per_s: float | None = Field(default=None, ge=0)
    """Iterations that are recorded per second at most, where `OTEL_EXPORTER_OTLP_ENDPOINT` says
    that there are traces; the scheduler's own limit when not set."""

    profile_dir: Path | None = None
    """Directory for profiles that are ordered of stages; without it there are none."""

    frontend: Options = ()
    """Further settings of the frontend, NAME=VALUE, as `python -m services.frontend --help` lists
    them; they win over what this launcher sets."""

    scheduler: Options = ()
    """Further settings of the scheduler, likewise."""

    worker: Options = ()
    """Further settings of every worker, likewise."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Least severe messages of the services to show."""
