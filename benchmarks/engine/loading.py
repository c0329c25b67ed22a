"""Measures the cost of loading a checkpoint: resident memory of a rank, and the rate of loading
compared with the rate of reading the files.

    python -m benchmarks.engine.loading [--quantization int4]

Writes a Llama checkpoint of random bfloat16 weights (1.2 GB unless `--layers` is given) into a
temporary folder. Then new processes load the whole checkpoint, half of its layers, and half of each
layer. Budget: the peak of resident memory is at most 1.3 times the rank's share of the weights,
plus the memory of the interpreter with torch. The rate of loading is printed beside the rate of
reading the same files from beginning to end, both with the files in the page cache.

With `--quantization` a process loads the whole checkpoint and keeps its matrices in a cache
(`services.worker.models.weight_cache`). A second process loads them from there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

MAX_RATIO = 1.3
HIDDEN_SIZE, N_HEADS, N_KV_HEADS, INTERMEDIATE_SIZE, VOCAB_SIZE = 2048, 16, 8, 5504, 32000
CASES = [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (0, 1, 0, 2), (0, 2, 1, 2)]

CHILD = """
import re, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from tqdm import tqdm
from services.worker.models.checkpoint import load_stage
from services.worker.models.weight_cache import WeightCache
def memory(key):
    # Not getrusage: what it calls the peak begins with that of the parent process.
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
empty = memory("VmRSS")
stage, n_stages, tp_rank, tp_size = map(int, sys.argv[2:6])
quantization, directory = sys.argv[6:]
cache = WeightCache(Path(directory), max_bytes=2**40, build="") if directory else None
loaded = 0
def on_progress(done, total):
    global loaded
    loaded = total
    bar.total = total
    bar.update(done - bar.n)
bar = tqdm(unit="B", unit_scale=True, leave=False)
start = time.perf_counter()
model = load_stage(
    Path(sys.argv[1]), stage_index=stage, n_stages=n_stages, tp_rank=tp_rank, tp_size=tp_size,
    dtype="auto", load_format="safetensors", device=torch.device("cpu"), on_progress=on_progress,
    quantization=quantization, cache=cache,
)
seconds = time.perf_counter() - start
bar.close()
peak = memory("VmHWM")
print(empty, peak, loaded, seconds)
"""


def write_checkpoint(directory: Path, n_layers: int) -> int:
    """Writes the checkpoint, with one file per layer, and returns its size in bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": n_layers,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    files = {"outer.safetensors": outer_shapes()}
    files |= {f"layer-{i}.safetensors": layer_shapes(i) for i in range(n_layers)}
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, shapes in tqdm(files.items(), desc="writing", leave=False):
        tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        save_file(tensors, directory / file)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def outer_shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors outside the layers, by name."""
    return {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN_SIZE),
        "model.norm.weight": (HIDDEN_SIZE,),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN_SIZE),
    }


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one layer's tensors, by name."""
    kv_size = HIDDEN_SIZE // N_HEADS * N_KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN_SIZE,),
        "post_attention_layernorm": (HIDDEN_SIZE,),
        "self_attn.q_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "self_attn.k_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.v_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.o_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    return {f"model.layers.{index}.{name}.weight": shape for name, shape in shapes.items()}


def read_rate(directory: Path) -> float:
    """Reads all files from beginning to end and returns the rate in GB/s."""
    n_bytes = 0
    start = time.perf_counter()
    for path in directory.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(2**22):
                n_bytes += len(chunk)
    return n_bytes / (time.perf_counter() - start) / 1e9


def load(
    directory: Path, case: tuple[int, int, int, int], quantization: str = "none", cache: str = ""
) -> tuple[float, float, float, float]:
    """Loads a checkpoint in a new process, which keeps quantized matrices in the directory `cache`
    if it is not empty. Returns the resident bytes of the empty interpreter, the resident bytes at
    the peak, the bytes of the weights, and the seconds of loading."""
    share = [str(number) for number in case]
    command = [sys.executable, "-c", CHILD, str(directory), *share, quantization, cache]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    empty, peak, loaded, seconds = (float(number) for number in output.split())
    return empty, peak, loaded, seconds


def compare_loads(directory: Path, quantization: str) -> None:
    """Prints the seconds of a first load, which quantizes the matrices, and of a second load, which
    reads the quantized matrices from the cache."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (load(directory, CASES[0], quantization, cache)[3] for _ in range(2))
        n_bytes = sum(path.stat().st_size for path in Path(cache).iterdir())
    print(f"{quantization}: {cold:.2f} s, then {warm:.2f} s from {n_bytes / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        n_bytes = write_checkpoint(directory, arguments.layers)
        if arguments.quantization != "none":
            compare_loads(directory, arguments.quantization)
            return
        read_rate(directory)
        print(
            f"checkpoint of {n_bytes / 1e9:.2f} GB; plain reading {read_rate(directory):.2f} GB/s"
        )
        print(f"{'stage':>7} {'tp':>5} {'weights MB':>11} {'peak MB':>8} {'ratio':>6} {'GB/s':>6}")
        for case in CASES:
            empty, peak, loaded, seconds = load(directory, case)
            ratio = (peak - empty) / loaded
            verdict = "kept" if ratio <= MAX_RATIO else "BROKEN"
            stage, n_stages, tp_rank, tp_size = case
            print(
                f"{stage} of {n_stages:>2} {tp_rank} of {tp_size} {loaded / 1e6:>9.0f} "
                f"{(peak - empty) / 1e6:>8.0f} {ratio:>6.2f} {loaded / seconds / 1e9:>6.2f}"
                f"  {verdict}"
            )


if __name__ == "__main__":
    main()
