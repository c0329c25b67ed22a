"""Settings of the local launcher, which passes them to the services that it starts."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, model_validator
from pydantic_settings import NoDecode

from services.common.adapter_sources import AdapterSources
from services.common.address import LOCALHOST
from services.common.by_model import ByModel, names_in
from services.common.cpus import usable_cpus
from services.common.gguf.header import model_name
from services.common.pooling import PoolingSetting
from services.common.settings import Host, ModelNames, ServiceSettings

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

    model: ByModel[Path]
    """Directory of the checkpoint, with config.json, weights and a tokenizer, or a GGUF file. To
    serve several models, give `NAME=DIRECTORY` for each. NAME is the name of the model in the API.
    Each model has workers and a scheduler of its own. Other settings apply to all models, unless
    `NAME=VALUE` gives a model its own."""

    adapters: ByModel[Path] = ()
    """Adapters (LoRA) of the model in PEFT's format, `NAME=DIRECTORY` for each, separated by commas
    or given one by one. Requests select an adapter with its name as the model. Only if one model is
    served."""

    allowed_adapter_sources: AdapterSources = ()
    """Directories below which clients may load adapters while the system runs, with `POST
    /v1/load_lora_adapter`; separated by commas or given one by one. When empty, they can load none.
    Only if one model is served."""

    max_loaded_adapters: int = Field(default=8, ge=1, le=1024)
    """Largest number of adapters that each rank holds in addition to the adapters of `adapters`."""

    pooling: ByModel[PoolingSetting] = ()
    """How a model that generates text also makes vectors of texts. For the embeddings of
    `/v1/embeddings`, `last` takes the hidden state of the last token, `mean` takes the mean over
    all tokens, and `cls` takes the hidden state of the first token. `yes-no` makes scores of pairs
    of texts from the logits of the tokens `yes` and `no`, as for Qwen3-Reranker. When empty, the
    checkpoint's own files decide. `NAME=KIND` sets it for one of several models."""

    served_model_name: ModelNames = ()
    """Names of the model in the API, separated by commas or given one by one. The default is the
    name of the model's directory or file. Only for a model that `model` gives no name."""

    stages: int = Field(default=1, ge=1)
    """Pipeline stages to cut each model into, one worker each."""

    pipelines: int = Field(default=1, ge=1)
    """Pipelines that serve each model side by side, each with `stages` workers. All pipelines of a
    model take their requests from one queue. With more than one, the scheduler assigns the stages
    to the workers, as in a cluster."""

    spares: int | None = Field(default=None, ge=0)
    """Number of spare workers of each model. A spare worker has started, and takes the stage of a
    lost worker at once. Unless the number is 0, each scheduler and the frontend have a spare, too:
    a process that takes over when the first one ends. So clients do not wait for the start of a
    process. A spare worker takes about 200 MiB, and 160 MiB more for each further rank of a stage;
    the other spares take 40 MiB each. When not set, there is one; with `fail_fast` or on a GPU
    there is none."""

    frontends: int | None = Field(default=None, ge=1, le=16)
    """Number of frontends. All serve the same ports: when one is lost, clients that connect again
    reach another one at once. With several, frontends have no spare. Limits of API keys and of
    `max_in_flight` count for each frontend on its own. When not set, there are 2 if this machine
    has more than two processors and the services are started again, and otherwise 1."""

    tp: int = Field(default=1, ge=1)
    """Ranks that share each layer of a stage (tensor parallelism)."""

    load_format: Literal["safetensors", "random"] = "safetensors"
    """Source of the weights. `random` is for benchmarks: the weights are random numbers, and only
    config.json and the tokenizer are read."""

    host: Host = LOCALHOST
    """Address of this machine at which clients reach both APIs. `::` or `0.0.0.0` stands for all
    addresses of the machine, of IPv6 and IPv4. At the default, only clients on this machine reach
    the APIs, at `127.0.0.1` and `::1`."""

    http_port: int = Field(default=8000, ge=0, lt=65536)
    """Port of the OpenAI API; 0 takes a free one."""

    grpc_port: int = Field(default=50051, ge=0, lt=65536)
    """Port of the gRPC API; 0 takes a free one."""

    api_keys_file: Path | None = None
    """JSON file with the API keys that clients must send, in the frontend's format. When not set,
    no key is needed."""

    receipts: Literal["off", "on_request", "always"] = "off"
    """Which answers have signed receipts that say how they were made: no answers, the answers to
    requests with the field `receipt`, or all answers. The setting is passed to frontend and
    workers."""

    receipt_keys_file: Path | None = None
    """File with the keys that sign receipts, in the frontend's format; `orcinus receipt-key FILE`
    makes one. Needed with `receipts`."""

    tls_dir: Path | None = None
    """Directory with `tls.crt` (the certificate, followed by intermediate ones) and `tls.key` (its
    private key, without a password) for clients of both APIs: the frontend's `public_tls_dir`, not
    the `tls_dir` of a service. When not set, clients speak without TLS."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of weights and K/V; `auto` takes the element type of the checkpoint."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Quantization of the matrices while they are loaded, as in the worker's settings."""

    weight_cache: Literal["auto", "off"] | Path = "auto"
    """Directory in which workers keep quantised matrices for the next start, as in the worker's
    settings. `auto` is `orcinus/weights` in the user's cache directory, `$XDG_CACHE_HOME` or
    `~/.cache`; with `off` nothing is kept."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence, in tokens, as in the worker's settings. When not set, it is the context of
    the checkpoint, or the original context if the checkpoint uses longrope (Phi). If the K/V memory
    (`kv_memory`) holds fewer tokens, that number is the limit."""

    max_batch_size: int = Field(default=32, ge=1)
    """Largest number of requests in one batch."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Largest number of batches in flight. The default is the number of stages, but at least 2."""

    policy: str | None = None
    """How the scheduler fills batches, by a name that the scheduler's setting `policy` has. When
    not set, the scheduler's default applies."""

    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of one iteration, with a policy that limits them, as `chunked` does.
    When not set, the scheduler's default applies."""

    prefix_cache: bool = True
    """Whether requests that begin with the same tokens share keys and values."""

    max_requests: int = Field(default=1024, ge=1)
    """Largest number of requests in the pool. Further requests are refused with a retry delay."""

    kv_memory: Literal["auto"] | Annotated[ByteSize, Field(ge=1)] = ByteSize(2**29)
    """Memory for keys and values of each rank, in bytes or like `512MiB`. `auto` needs a GPU, which
    a worker has with `--worker device=cuda`. On a CPU the memory is in a directory of `/dev/shm`,
    unless `fail_fast` is set, so that a worker can take over the keys and values of a lost one."""

    iteration_limit_s: float = Field(default=900.0, gt=0)
    """Seconds after which an iteration that has not returned ends the epoch. The value must exceed
    the duration of the longest iteration. A stage that dies is noticed at once."""

    threads: int = Field(default=0, ge=0)
    """Compute threads of each rank. With 0, the usable CPUs are divided among the ranks of all
    workers of all models."""

    page: bool = True
    """Whether the frontend serves a page at `/` that shows the pipeline at work. Without API keys,
    every caller that reaches `host` may see the page."""

    fail_fast: bool = False
    """Whether all services end when the first of them dies or hangs. Otherwise that service is
    started again. All services end when one that is needed has been started again five times
    without becoming ready."""

    metrics: bool = False
    """Whether each service serves `/metrics`, on a free port of loopback that is printed at start.
    """

    traced_iterations_per_s: float | None = Field(default=None, ge=0)
    """Largest number of iterations per second that are recorded as spans, where
    `OTEL_EXPORTER_OTLP_ENDPOINT` is set. When not set, the scheduler's default applies."""

    profile_dir: Path | None = None
    """Directory for profiles that are requested of stages. When not set, no profiles can be
    requested."""

    frontend: Options = ()
    """Further settings of the frontend, NAME=VALUE, separated by commas or given one by one. They
    override the settings that this launcher passes."""

    scheduler: Options = ()
    """Further settings of the scheduler, NAME=VALUE, separated by commas or given one by one. They
    override the settings that this launcher passes."""

    worker: Options = ()
    """Further settings of every worker, NAME=VALUE, separated by commas or given one by one. They
    override the settings that this launcher passes."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Lowest level of the services' log messages that are shown."""

    @property
    def n_workers(self) -> int:
        """Number of workers of all models, with their spares."""
        return len(self.model) * self.n_workers_each

    @property
    def n_workers_each(self) -> int:
        """Number of workers of each model, with its spares."""
        return self.n_computing_each + self.n_spares_each

    @property
    def n_computing_each(self) -> int:
        """Number of workers that the pipelines of each model need: `pipelines` times `stages`.
        Spare workers are not counted."""
        return self.pipelines * self.stages

    @property
    def n_spares_each(self) -> int:
        """Number of spare workers of each model."""
        if self.spares is not None:
            return self.spares
        return 0 if self.fail_fast or dict(self.worker).get("device", "cpu") != "cpu" else 1

    @property
    def has_spares(self) -> bool:
        """Whether each model has spare workers."""
        return self.n_spares_each > 0

    @property
    def n_frontends(self) -> int:
        """Number of frontends."""
        if self.frontends is not None:
            return self.frontends
        return 2 if usable_cpus() > 2 and not self.fail_fast else 1

    @property
    def has_fixed_stages(self) -> bool:
        """Whether each worker gets its stage as a setting. With several pipelines or spare workers,
        the scheduler assigns the stages, because a worker may have to take the stage of a lost
        worker."""
        return self.pipelines == 1 and not self.has_spares

    @property
    def keeps_kv(self) -> bool:
        """Whether the keys and values of workers are kept when a worker process ends. They are kept
        if workers run on CPUs and are started again."""
        return not self.fail_fast and dict(self.worker).get("device", "cpu") == "cpu"

    def is_spare(self, index: int) -> bool:
        """Returns whether a worker starts as a spare. `index` counts the workers of all models. The
        workers of a model have consecutive numbers, and its spares come last."""
        return index % self.n_workers_each >= self.n_computing_each

    @property
    def model_names(self) -> tuple[str, ...]:
        """The name of each model, as in the answers of the API."""
        served = next(iter(self.served_model_name), "")
        return tuple(name or served or model_name(path) for name, path in self.model)

    @property
    def weight_cache_directory(self) -> Path | None:
        """Directory for the workers' quantised matrices, or None if they keep none."""
        if isinstance(self.weight_cache, Path):
            return self.weight_cache
        if self.weight_cache == "off":
            return None
        try:
            user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # the user has no home
            return None
        return Path(user_cache) / "orcinus" / "weights"

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = names_in(self.model)
        if len(self.model) > max(1, len(names)):
            raise ValueError("model: several models need a name each: NAME=DIRECTORY")
        if names and self.served_model_name:
            raise ValueError("served_model_name: not together with a NAME in `model`")
        return self

    @model_validator(mode="after")
    def _check_pooling(self) -> Self:
        for name in names_in(self.pooling):
            if name not in names_in(self.model):
                raise ValueError(f"pooling: `model` has no model named {name}")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.adapters and len(self.model) > 1:
            raise ValueError("adapters: only if one model is served")
        if self.allowed_adapter_sources and len(self.model) > 1:
            raise ValueError("allowed_adapter_sources: only if one model is served")
        for name, directory in self.adapters:
            if not name:
                raise ValueError(f"adapters: {directory} needs a name: NAME=DIRECTORY")
            if name in (*self.served_model_name, *self.model_names):
                raise ValueError(f"adapters: {name} is the name of the model")
        return self
