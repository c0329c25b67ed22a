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
    """Directory of the checkpoint, with config.json, safetensors and tokenizer.json, or a GGUF
    file."""

    served_model_name: ModelNames = ()
    """Names by which clients know the model, separated by commas or given one by one. Without any,
    the name of its directory or file."""

    stages: int = Field(default=1, ge=1)
    """Pipeline stages to cut the model into, one worker each."""

    tp: int = Field(default=1, ge=1)
    """Ranks that share each layer of a stage (tensor parallelism)."""

    load_format: Literal["safetensors", "random"] = "safetensors"
    """Where weights come from. `random` makes them up, needs only config.json and the tokenizer,
    and is for benchmarks."""

    host: str = Field(default="127.0.0.1", pattern=r"^[^\s/]+$")
    """Address of this machine at which clients reach both APIs; `0.0.0.0` is all of its addresses.
    The default keeps other machines out."""

    http_port: int = Field(default=8000, ge=0, lt=65536)
    """Port of the OpenAI API; 0 takes a free one."""

    grpc_port: int = Field(default=50051, ge=0, lt=65536)
    """Port of the gRPC API; 0 takes a free one."""

    api_keys_file: Path | None = None
    """JSON file with the API keys that clients must show, as for the frontend. When not set, no key
    is asked for."""

    tls_dir: Path | None = None
    """Directory with `tls.crt` (the certificate, followed by intermediate ones) and `tls.key` (its
    private key, without a password) for clients of both APIs: the frontend's `public_tls_dir`, not
    the `tls_dir` of a service. When not set, clients speak without TLS."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of weights and K/V; `auto` takes the checkpoint's."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Quantization of matrices when they are loaded, as for the worker."""

    max_batch_size: int = Field(default=32, ge=1)
    """Requests in one batch at most."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Batches in flight at most. When not set, the number of stages, and at least two."""

    policy: Literal["orca", "chunked"] | None = None
    """How the scheduler fills batches; its default when not set."""

    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one iteration at most, with the policy `chunked`; the scheduler's default when not
    set."""

    prefix_cache: bool = True
    """Whether requests that begin with the same tokens share keys and values."""

    max_requests: int = Field(default=1024, ge=1)
    """Requests in the pool at most; more are refused with a retry delay."""

    kv_memory: Literal["auto"] | Annotated[ByteSize, Field(ge=1)] = ByteSize(2**29)
    """Memory for keys and values of each rank, in bytes or like `512MiB`. `auto` needs a GPU, which
    a worker has with `--worker device=cuda`."""

    iteration_limit_s: float = Field(default=900.0, gt=0)
    """Seconds after which an iteration that has not returned ends the epoch; must exceed the
    longest one. A stage that dies is noticed at once."""

    threads: int = Field(default=0, ge=0)
    """Compute threads of each rank; 0 divides the CPUs that may be used among all ranks."""

    page: bool = True
    """Whether the frontend serves a page at `/` that shows the pipeline at work. Without API keys,
    every caller that reaches `host` may look."""

    fail_fast: bool = False
    """Whether everything ends with the first service that dies or hangs. Otherwise the service is
    started again, up to five times in a minute."""

    metrics: bool = False
    """Whether each service serves `/metrics`, on a free port of loopback that is printed at start.
    """

    traced_iterations_per_s: float | None = Field(default=None, ge=0)
    """Iterations that are recorded as spans per second at most, where `OTEL_EXPORTER_OTLP_ENDPOINT`
    is set; the scheduler's own limit when not set."""

    profile_dir: Path | None = None
    """Directory for profiles that are ordered of stages. When not set, profiles cannot be ordered.
    """

    frontend: Options = ()
    """Further settings of the frontend, NAME=VALUE, separated by commas or given one by one; they
    win over what this launcher sets."""

    scheduler: Options = ()
    """Further settings of the scheduler, in the same form."""

    worker: Options = ()
    """Further settings of every worker, in the same form."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Least severe messages of the services to show."""
