"""The catalogue of peers: the adapter, the environment and the required libraries of each."""

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT_VENVS = Path.home() / ".cache" / "orcinus-peers"


@dataclass(frozen=True)
class Peer:
    """An engine that is compared with Orcinus."""

    name: str
    module: str
    """Name of the adapter module in this package. The requirements of its environment are in the
    file with this name and the suffix `.txt`."""
    unwanted: tuple[str, ...] = ()
    """Packages that pip installs as requirements and that are removed afterwards. They are not
    needed, and have no build for PyTorch on CPUs."""
    build_environment: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    """Libraries that the peer's process preloads, as file names: in the environment's folder `lib`,
    or installed on the machine."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> Path:
        return HERE / f"{self.module}.txt"

    def venv(self, venvs: Path) -> Path:
        return venvs / self.name

    def python(self, venvs: Path) -> Path:
        return self.venv(venvs) / "bin" / "python"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", "transformers_static"),
        Peer(
            "vllm",
            "vllm_cpu",
            unwanted=("torchaudio", "torchcodec", "torchvision"),
            preload=("libtcmalloc_minimal.so.4", "libiomp5.so"),
            environment={
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            },
        ),
        Peer("openvino", "openvino_genai", unwanted=("torchvision",)),
        Peer(
            "llama_cpp",
            "llama_cpp",
            build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
    )
}
"""Peers that generate tokens, by their names."""

ENCODERS = {
    peer.name: peer for peer in (Peer("sentence_transformers", "sentence_transformers_peer"),)
}
"""Peers that compute embeddings of texts, by their names."""
