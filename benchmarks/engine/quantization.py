"""The loss of accuracy by int8 and int4 weights, and the gain in speed.

    python -m benchmarks.engine.quantization [--threads 2]

The first table compares element types, each with and without quantized weights; int4 is also
measured with inputs of matrix products that are not quantized (`exact`). It shows the loss in bits
per byte on documents which the demo model was not trained on, counted as in `models.train_demo`. It
also shows the share of tokens after which the argmax of the logits equals the argmax with float32.
The second table shows the milliseconds of one layer's matrix products, with the shapes of
`benchmarks.make_model`'s llama-125m, where the weights come from memory.
"""

import argparse
import math
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from benchmarks.machine import ROOT
from kernels.packing.linear import pack
from kernels.weights.linear import Activations, LinearWeight, Quantization
from models.train_demo.chat import BOS, EOS
from models.train_demo.corpus import Document, collect
from models.train_demo.model import MAX_CONTEXT
from services.common.sampling import SamplingParams
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import StageModel
from services.worker.models.checkpoint import load_stage

DEMO = ROOT / "models" / "demo"
BLOCK_SIZE = 16
N_BLOCKS = MAX_CONTEXT // BLOCK_SIZE
GREEDY = SamplingParams(temperature=0)
FORMS: list[tuple[str, Quantization, Activations]] = [
    ("float32", "none", "exact"),
    ("float32", "int8", "rounded"),
    ("float32", "int4", "exact"),
    ("float32", "int4", "rounded"),
    ("bfloat16", "none", "exact"),
    ("bfloat16", "int8", "rounded"),
    ("bfloat16", "int4", "exact"),
    ("bfloat16", "int4", "rounded"),
]
SHAPES = [(768, 1280), (768, 768), (768, 4096), (2048, 768)]  # n_in, n_out
BATCHES = (1, 16, 64, 512)
COLD_BYTES = 100 << 20
N_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Loss:
    """The sum of the loss over all tokens of all windows, in bits, and the argmax of the logits
    after each token."""

    n_bits: float
    argmax: Tensor  # [n_tokens]


def windows_of(documents: Sequence[Document]) -> list[list[int]]:
    """Returns the tokens of the documents, cut into windows. The last token of a window is also the
    first token of the next window of the same document."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    windows = []
    for document in documents:
        ids = tokenizer.encode(BOS + document.text + EOS, add_special_tokens=False).ids
        for begin in range(0, len(ids) - 1, MAX_CONTEXT):
            windows.append(ids[begin : begin + MAX_CONTEXT + 1])
    return windows


def load(dtype: str, quantization: Quantization, activations: Activations) -> StageModel:
    """Loads the whole demo model. `activations` is the form of the inputs of matrix products."""
    return load_stage(
        DEMO,
        stage_index=0,
        n_stages=1,
        tp_rank=0,
        tp_size=1,
        dtype=dtype,
        quantization=quantization,
        activations=activations,
        device=torch.device("cpu"),
        on_progress=lambda n_done, n_total: None,
    )


def loss_of(model: StageModel, windows: Sequence[Sequence[int]], name: str) -> Loss:
    """Returns the loss of a model over all windows. Each window runs as the prompt of a request."""
    n_groups = len(model.kv_groups.windows)
    runner = ModelRunner(model, n_kv_blocks=N_BLOCKS * n_groups, block_size=BLOCK_SIZE)
    nats = 0.0
    argmax = []
    for iteration, window in enumerate(tqdm(windows, desc=name, leave=False)):
        inputs, targets = window[:-1], torch.tensor(window[1:])
        n_blocks = -(-len(inputs) // BLOCK_SIZE)
        plan = IterationPlan(
            iteration=iteration,
            released_rows=[0] if iteration else [],
            admissions=[Admission(0, len(inputs), GREEDY)],
            rows=[0],
            start_positions=[0],
            n_tokens=[len(inputs)],
            sample=[False],
            n_new_blocks=[n_blocks],
            token_on_rank=[False],
            token_ids=inputs,
            new_block_ids=range(n_blocks * n_groups),
        )
        with torch.inference_mode():
            hidden = runner.forward(runner.prepare(plan), None)
            logits = model.logits(hidden).float()  # [n_tokens, vocab_size]
            nats += cross_entropy(logits, targets, reduction="sum").item()
            argmax.append(logits.argmax(1))
    return Loss(nats / math.log(2), torch.cat(argmax))


def compare_accuracy() -> None:
    """Prints the accuracy of the demo model, one line for each form of its weights."""
    documents = [
        document
        for document in collect(Path(sysconfig.get_paths()["stdlib"]))
        if document.is_held_out
    ]
    n_bytes = sum(len(document.text.encode()) for document in documents)
    windows = windows_of(documents)
    print(f"{len(documents)} documents held out, {n_bytes} bytes")
    print(f"{'':<24}{'bits per byte':>14}{'same token':>12}")
    exact: Loss | None = None
    for dtype, quantization, activations in FORMS:
        name = dtype if quantization == "none" else f"{dtype} {quantization} {activations}"
        loss = loss_of(load(dtype, quantization, activations), windows, name)
        exact = exact or loss
        agreement = (loss.argmax == exact.argmax).float().mean().item()
        print(f"{name:<24}{loss.n_bits / n_bytes:>14.4f}{agreement:>12.1%}")


def seconds_of(layers: Sequence[Sequence[LinearWeight]], inputs: Sequence[Tensor]) -> float:
    """Runs the matrix products of all layers, and returns the mean seconds per layer."""
    start = time.perf_counter()
    for layer in layers:
        for weight, x in zip(layer, inputs, strict=True):
            weight(x)
    return (time.perf_counter() - start) / len(layers)


def compare_speed() -> None:
    """Prints the milliseconds of a layer's matrix products for each form of weights and number of
    tokens. The forms take turns; the fastest round of each counts."""
    n_bytes = 2 * sum(n_in * n_out for n_in, n_out in SHAPES)  # of a layer in bfloat16
    plain = [
        [torch.randn(n_out, n_in).mul_(0.02).bfloat16() for n_in, n_out in SHAPES]
        for _ in range(2 * COLD_BYTES // n_bytes)
    ]
    forms: dict[str, list[list[LinearWeight]]] = {
        "none": [[pack(weight) for weight in layer] for layer in plain],
        "int8": [[pack(weight, "int8") for weight in layer] for layer in plain],
        "int4": [[pack(weight, "int4") for weight in layer] for layer in plain],
        "exact": [[pack(weight, "int4", "exact") for weight in layer] for layer in plain],
    }
    heads = f"{'tokens':<8}{'bfloat16 ms':>12}{'int8':>8}{'int4':>8}{'exact int4':>12}"
    print(f"\n{heads}  of its time")
    for n_tokens in tqdm(BATCHES, leave=False):
        inputs = [torch.randn(n_tokens, n_in).bfloat16() for n_in, _ in SHAPES]
        best = dict.fromkeys(forms, float("inf"))
        for _ in range(N_ROUNDS):
            for form, layers in forms.items():
                best[form] = min(best[form], seconds_of(layers, inputs))
        int8, int4, exact = (best[form] / best["none"] for form in ("int8", "int4", "exact"))
        of_int = f"{int8:>8.2f}{int4:>8.2f}{exact:>12.2f}"
        tqdm.write(f"{n_tokens:<8}{1e3 * best['none']:>12.3f}{of_int}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compare_accuracy()
    compare_speed()


if __name__ == "__main__":
    main()
