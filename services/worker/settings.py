"""The settings of a stage, and the settings that it passes to each of its ranks.

    SharedSettings   settings of the controller and of the ranks
    PipelinePlace    the stage that a worker is, by its settings or by a leader's assignment
    FreeRankSettings SharedSettings, with the values for one rank whose stage is not known yet
    RankSettings     FreeRankSettings, with the rank's stage
    WorkerSettings   SharedSettings, the settings of every server, and those of the controller only

A setting of ranks is defined once, in SharedSettings.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ByteSize, Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.adapter_sources import AdapterSources
from services.common.adapters import check_name
from services.common.address import LOCALHOST, own_ip
from services.common.by_model import ByModel
from services.common.gguf.header import model_name
from services.common.pooling import PoolingSetting
from services.common.settings import Host, HostPort, ServerSettings
from services.common.telemetry import LogFormat

Dtype = Literal["auto", "float32", "bfloat16"]
DataPlane = Literal["auto", "gloo", "nccl"]
LoadFormat = Literal["safetensors", "random"]
Quantization = Literal["none", "int8", "int4"]
Activations = Literal["rounded", "exact"]
Receipts = Literal["off", "on_request", "always"]


class SharedSettings(BaseModel):
    """Settings that the controller of a stage and its ranks have in common."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    model: Path
    """Directory of the checkpoint, with config.json and weights, or a GGUF file. All workers of
    a pipeline must have the same checkpoint."""

    served_model_name: str = ""
    """Name of the model that the pipeline reports. When empty, the name of the directory or file.
    """

    adapters: ByModel[Path] = ()
    """Adapters (LoRA) that requests may select by their names: `NAME=DIRECTORY` for each, in PEFT's
    format, separated by commas or given one by one. All workers of a model must have the same
    adapters."""

    allowed_adapter_sources: AdapterSources = ()
    """Absolute directories, separated by commas or given one by one. An adapter that a client loads
    while the system runs must lie below one of them. When empty, clients can load none. All workers
    of a model must have the same value."""

    max_loaded_adapters: int = Field(default=8, ge=1, le=1024)
    """Largest number of adapters loaded by clients that a rank holds in memory, in addition to the
    adapters in `adapters`. Has an effect only if `allowed_adapter_sources` is set. The least
    recently used adapter is removed to make room for another. All workers of a model must have the
    same value."""

    pooling: PoolingSetting = ""
    """How a model that generates text also makes vectors of texts (embeddings or scores). For the
    embeddings of `/v1/embeddings`, `last` takes the hidden state of the last token, `mean` takes
    the mean over all tokens, and `cls` takes the hidden state of the first token. `yes-no` makes
    scores of pairs of texts from the logits of the tokens `yes` and `no`, as for Qwen3-Reranker.
    When empty, the checkpoint's own files decide. All workers of a model must have the same
    value."""

    n_stages: int = Field(default=1, ge=1)
    """Number of stages into which the model is divided. If the leader assigns the stage, the leader
    also sets this number."""

    tp_size: int = Field(default=1, ge=1)
    """Number of ranks of this stage, which share each layer (tensor parallelism). On GPUs, each
    rank has one GPU."""

    dtype: Dtype = "auto"
    """Element type of weights and K/V. `auto` is the checkpoint's type, or float32 for float16."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence, in tokens. When not set, it is the context length of the checkpoint. For
    longrope (Phi), it is then the original context length, within which the short factors are used
    as in `transformers`. Set more to serve the stretched context, with the long factors for all
    sequences. If the K/V memory holds fewer tokens, that number is served. All stages must have the
    same value."""

    quantization: Quantization = "none"
    """Quantization of matrices when they are loaded: `int8` takes half of bfloat16's memory, `int4`
    less than a third, and both are less exact. Needs the native kernels on a CPU and Triton on a
    GPU. All stages must have the same value. Norms, routers and experts are not quantised, nor are
    matrices that the files already store with so few bits."""

    activations: Activations = "rounded"
    """Whether the inputs of products with quantised matrices are rounded. With `rounded` a CPU
    rounds them to int8 where that is faster: for matrices of 4 bits, and with VNNI for `int8`. With
    `exact` no product rounds its inputs. All stages must have the same value."""

    weight_cache: Path | None = None
    """Directory in which ranks on a CPU keep their quantised matrices in the form that they have in
    memory. The next start maps these files, and reads no weights for these matrices. In a pod the
    directory must be a volume. When not set, nothing is kept."""

    weight_cache_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(20 * 2**30)
    """Largest size of all files in `weight_cache`, in bytes or like `20GiB`. The files that have
    not been used for the longest time are removed to make room."""

    kv_directory: Path | None = None
    """Directory in memory, such as one below `/dev/shm`, for the keys and values of ranks on a CPU.
    The keys and values then outlive a rank's process, and the rank's next process uses them again.
    Prompts can be reconstructed from these files, so only the user of the process can read them.
    When not set, keys and values are lost whenever an epoch ends."""

    load_format: LoadFormat = "safetensors"
    """Source of the weights. `random` makes random weights, needs only config.json and is for
    benchmarks."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device on which the ranks compute."""

    data_plane: DataPlane = "auto"
    """Library that transfers tensors between ranks. `auto` is gloo on a CPU and NCCL on GPUs.
    `gloo` on GPUs copies tensors through the CPU, for several ranks on one GPU, which NCCL refuses.
    """

    receipts: Receipts = "off"
    """Whether frontends make receipts of answers: `off`, `on_request` or `always`. Unless it is
    `off`, each rank reads all weight files at start to compute their digest, which takes about a
    second for 1.5 GB, and all workers of a pipeline must compute with the same kind of kernels."""

    block_size: int = Field(default=16, ge=1)
    """Number of K/V slots (tokens) in a block, equal on all stages. Smaller blocks waste less
    memory at the end of a sequence, larger blocks need less bookkeeping."""

    device_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that a rank may use if its `kv_memory` is `auto`. The rest is for
    NCCL and for fragmentation; lower it if a GPU runs out of memory."""

    trial_tokens: int = Field(default=8192, ge=1)
    """Number of tokens of the trial iteration with which a rank measures how much memory an
    iteration needs, if `kv_memory` is `auto`. Set at least the scheduler's `max_batch_tokens`. With
    the policy `orca`, set the number of tokens of a batch of long prompts."""

    cuda_graphs: bool = True
    """Whether GPUs run batches of decodes as recorded CUDA graphs, which saves launching kernels
    one by one. With the data plane `gloo`, no graphs are used."""

    max_graph_batch_size: int = Field(default=256, ge=1)
    """Largest number of requests in a batch of decodes that runs as a CUDA graph. Larger batches
    keep a GPU busy without a graph, and each graph takes memory."""

    data_host: Annotated[Host, AfterValidator(own_ip)] = Field(
        default=LOCALHOST, validate_default=True
    )
    """IP address of this machine, of IPv4 or IPv6, at which ranks of other stages reach the ranks
    of this stage. All stages must use IPv4, or all must use IPv6. The default is for pipelines
    within one machine."""

    rendezvous_port: int = Field(default=0, ge=0, lt=65536)
    """Port of stage 0 at which the ranks of all stages meet. 0 takes a free port. Set a port if a
    firewall must allow the connections."""

    transfer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a rank stops waiting for a tensor of another rank, and longest time in
    which a rank may compute one iteration. Must exceed the longest iteration. When an epoch ends,
    its waits end at once, so a new epoch need not wait for this timeout."""

    hang_limit_s: float = Field(default=7.0, ge=2)
    """Seconds that an iteration may take on a rank, in addition to ten times the time of earlier
    iterations of its size. A rank that takes longer counts as hung, and its stage starts again. Set
    less than the scheduler's `hang_limit_s`, which ends the epoch, and more than
    `rank_silence_limit_s`."""

    @property
    def n_loaded_adapters(self) -> int:
        """Number of adapters that clients may have loaded at a time: 0 if they can load none."""
        return self.max_loaded_adapters if self.allowed_adapter_sources else 0

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        for name, directory in self.adapters:
            if not name:
                raise ValueError(f"adapters: {directory} needs a name: NAME=DIRECTORY")
            check_name(name)
        return self


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """The index of a stage in its pipeline, and the number of stages."""

    stage_index: int
    n_stages: int

    def __str__(self) -> str:
        return f"stage {self.stage_index} of {self.n_stages}"

    def to_bytes(self) -> bytes:
        """Returns the place as the payload of a message to a rank (`MessageKind.PLACE`)."""
        return f"{self.stage_index} {self.n_stages}".encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        """Returns the place that `to_bytes` has converted to `payload`."""
        stage_index, n_stages = (int(number) for number in payload.split())
        return cls(stage_index, n_stages)


class FreeRankSettings(SharedSettings):
    """Settings of one rank whose stage is not known yet. The rank receives them as JSON."""

    tp_rank: int
    kv_memory_bytes: int | None  # None: all memory that the device has left
    log_level: str
    log_format: LogFormat = "text"

    def at(self, place: PipelinePlace) -> "RankSettings":
        """Returns the settings of this rank for the stage `place`."""
        own = {"stage_index": place.stage_index, "n_stages": place.n_stages}
        return RankSettings.model_validate(self.model_dump() | own)


class RankSettings(FreeRankSettings):
    """Settings of one rank of a stage."""

    stage_index: int


class WorkerSettings(SharedSettings, ServerSettings):
    """All settings of a stage, from `ORCINUS_*` variables or the command line."""

    address: HostPort = "localhost:50053"
    """Address, host:port, where the controller listens for schedulers and other workers. The
    default is reachable only from this machine, because without TLS every caller may command the
    stage. Port 0 takes a free port."""

    stage_index: int | None = Field(default=None, ge=0)
    """Stage of this worker, counted from 0. When not set, the worker is free: it loads weights once
    the leading scheduler has assigned it a stage."""

    drain_s: float = Field(default=120.0, ge=0, le=86400)
    """Longest time, in seconds, for which a worker that is told to stop goes on serving. It ends
    earlier if its pipeline no longer needs it: 15 seconds after the pipeline has moved the requests
    away, or after a replacement has taken over. A pod's grace period must be longer."""

    load_limit_s: float = Field(default=600.0, gt=0)
    """Seconds in which a stage must have read its weights. A worker that exceeds the limit ends, so
    that a hung volume is noticed."""

    kv_memory: Literal["auto"] | Annotated[ByteSize, Field(ge=1)] | None = None
    """Memory for keys and values on each rank, in bytes or like `512MiB`. `auto` takes the part of
    `device_memory_fraction` that is left by weights, an iteration of `trial_tokens` tokens,
    transfers and CUDA graphs. When not set, `auto` on GPUs and 1 GiB on a CPU."""

    n_threads: int = Field(default=0, ge=0)
    """Compute threads of each rank on a CPU. 0 divides the CPUs that the process may use among the
    ranks of the stage, rounded down. Affinity and the quota of control groups limit these CPUs."""

    cpus: str = Field(default="", pattern=r"^(\d+(,\d+)*)?$")
    """Numbers of the CPUs for this stage's ranks, such as `0,1`: `n_threads` of them for each rank.
    When empty, the operating system places threads."""

    profile_dir: Path | None = None
    """Directory for profiles of iterations, which `python -m services.worker.profile` orders. When
    not set, profiles cannot be ordered."""

    rank_silence_limit_s: float | None = Field(default=None, ge=1)
    """Seconds without a heartbeat after which a loaded rank counts as lost, and its stage starts
    again. A separate thread of the rank sends four heartbeats per second, so only a rank that is
    stopped or gets no processor time is silent. Seconds in which the controller did not run do not
    count. When not set, 2 on a CPU and 5 on GPUs, where compiling a kernel may hold up the
    thread."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.stage_index is not None and self.stage_index >= self.n_stages:
            raise ValueError(
                f"stage {self.stage_index} is not one of {self.n_stages}, which count from 0"
            )
        return self

    @model_validator(mode="after")
    def _check_data_plane(self) -> Self:
        if self.device == "cpu" and self.data_plane == "nccl":
            raise ValueError("data_plane nccl moves tensors of GPUs; the device is cpu")
        return self

    @model_validator(mode="after")
    def _check_kv_memory(self) -> Self:
        if self.kv_memory == "auto" and self.device == "cpu":
            raise ValueError("kv_memory auto asks a GPU how much it has; the device is cpu")
        if self.kv_memory in ("auto", None) and self.data_plane == "gloo" and self.device != "cpu":
            raise ValueError(
                "kv_memory must be given with data_plane gloo, for ranks that may share a GPU"
            )
        return self

    @model_validator(mode="after")
    def _check_cpus(self) -> Self:
        n_cpus = len(self.cpus.split(",")) if self.cpus else 0
        if n_cpus and n_cpus != self.tp_size * self.n_threads:
            raise ValueError(
                f"cpus names {n_cpus} for {self.tp_size} ranks of {self.n_threads} threads each"
            )
        return self

    def cpus_of(self, tp_rank: int) -> list[int]:
        """Returns the CPUs to which one rank's threads are bound. The result is empty if the
        operating system places the threads."""
        cpus = [int(cpu) for cpu in self.cpus.split(",") if cpu]
        return cpus[tp_rank * self.n_threads : (tp_rank + 1) * self.n_threads]

    @property
    def place(self) -> PipelinePlace | None:
        """The stage of this worker according to its settings, or None if a leader assigns one."""
        return None if self.stage_index is None else PipelinePlace(self.stage_index, self.n_stages)

    @property
    def silence_limit_s(self) -> float:
        """Seconds without a heartbeat after which a loaded rank counts as lost."""
        if self.rank_silence_limit_s is not None:
            return self.rank_silence_limit_s
        return 5.0 if self.device == "cuda" else 2.0

    @property
    def _kv_memory_bytes(self) -> int | None:
        if isinstance(self.kv_memory, ByteSize):
            return int(self.kv_memory)
        return None if self.device == "cuda" else 2**30

    def for_rank(self, tp_rank: int) -> FreeRankSettings:
        """Returns the settings of the rank `tp_rank`."""
        # The default name is taken from the path as given: a link may lead to a name that is a
        # hash.
        own = {
            "tp_rank": tp_rank,
            "served_model_name": self.served_model_name or model_name(self.model),
            "kv_memory_bytes": self._kv_memory_bytes,
        }
        return FreeRankSettings.model_validate(
            self.model_dump(include=set(FreeRankSettings.model_fields)) | own
        )
