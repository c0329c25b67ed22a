"""Settings of a stage: those of its controller, and what it tells each of its ranks."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from services.common.settings import ServiceSettings

Dtype = Literal["auto", "float32", "bfloat16"]
DataPlane = Literal["auto", "gloo", "nccl"]
LoadFormat = Literal["safetensors", "random"]


class RankSettings(BaseModel):
    """What a rank is told when it starts, as JSON on its command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    served_model_name: str
    stage_index: int
    n_stages: int
    tp_rank: int
    tp_size: int
    dtype: Dtype
    device: Literal["cpu", "cuda"]
    data_plane: DataPlane
    load_format: LoadFormat
    block_size: int
    kv_memory_bytes: int
    data_host: str
    rendezvous_port: int
    transfer_timeout_s: float
    log_level: str


class WorkerSettings(ServiceSettings):
    """Everything that can be set, from `ORCINUS_*` variables or the command line."""

    model: Path
    """Directory of the checkpoint: config.json and safetensors."""

    served_model_name: str = ""
    """Name of the model as clients spell it; the directory's name when empty."""

    address: str = "0.0.0.0:50053"
    """Where the controller listens, host:port; port 0 takes a free one."""

    stage_index: int = Field(default=0, ge=0)
    """Place in the pipeline, from 0."""

    n_stages: int = Field(default=1, ge=1)
    """Stages the model is cut into."""

    tp_size: int = Field(default=1, ge=1)
    """Ranks that share each layer of this stage."""

    dtype: Dtype = "auto"
    """Element type of weights and K/V; `auto` takes the checkpoint's."""

    load_format: LoadFormat = "safetensors"
    """Where weights come from; `random` needs only config.json and is for benchmarks."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute."""

    data_plane: DataPlane = "auto"
    """How tensors travel between ranks: `auto` takes gloo on a CPU and NCCL on GPUs; `gloo` on GPUs
    copies them through the CPU, for several ranks on one GPU."""

    block_size: int = Field(default=16, ge=1)
    """K/V slots in a block; the same on all stages."""

    kv_memory: ByteSize = Field(default=ByteSize(2**30), ge=1)
    """Memory for keys and values on each rank, in bytes or like `512MiB`."""

    n_threads: int = Field(default=0, ge=0)
    """Compute threads of a rank on a CPU; 0 leaves it to torch (one for each core)."""

    data_host: str = "127.0.0.1"
    """Address of this machine at which other stages' ranks reach its ranks."""

    rendezvous_port: int = Field(default=0, ge=0, lt=65536)
    """Where the ranks of all stages meet, on stage 0; 0 takes a free one."""

    transfer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a rank gives up waiting for another's tensor; must exceed the longest
    iteration."""

    ready_fd: int | None = None
    """File descriptor on which a local launcher waits for progress and the address; binds this
    process's life to the launcher's."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Least severe messages to log."""

    @model_validator(mode="after")
    def _check_data_plane(self) -> Self:
        if self.device == "cpu" and self.data_plane == "nccl":
            raise ValueError("data_plane nccl moves tensors of GPUs; the device is cpu")
        return self

    def for_rank(self, tp_rank: int) -> RankSettings:
        """What the rank of that number is told."""
        return RankSettings(
            model=self.model,
            served_model_name=self.served_model_name or self.model.resolve().name,
            stage_index=self.stage_index,
            n_stages=self.n_stages,
            tp_rank=tp_rank,
            tp_size=self.tp_size,
            dtype=self.dtype,
            device=self.device,
            data_plane=self.data_plane,
            load_format=self.load_format,
            block_size=self.block_size,
            kv_memory_bytes=int(self.kv_memory),
            data_host=self.data_host,
            rendezvous_port=self.rendezvous_port,
            transfer_timeout_s=self.transfer_timeout_s,
            log_level=self.log_level,
        )
