"""Which peers there are: the adapter of each, its environment, and what it needs around it."""

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT_VENVS = Path.home() / ".cache" / "orcinus-peers"


@dataclass(frozen=True)
class Peer:
    """An engine to be compared with."""

    name: str
    module: str
    """Adapter in this package; the file beside it ending in .txt has its requirements."""
    unwanted: tuple[str, ...] = ()
    """Packages that it asks for and that are removed again, because nothing here needs them and
    their builds do not fit the PyTorch for processors."""
    build_environment: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    """Libraries its process starts with: names in its environment's `lib`, or on the machine."""
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
