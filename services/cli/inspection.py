"""`python -m services.cli.inspection MODEL …`: prints the facts about a checkpoint as JSON.

The checkpoint is read with the code of stages and frontends, but no weights are read. The program
runs in a process of its own because it needs PyTorch. Importing PyTorch takes seconds and much
memory, which the other commands of `orcinus` avoid.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from kernels import ops_for
from kernels.forms.experts import ExpertForm
from kernels.packing.linear import can_compute
from kernels.steps import ExpertMatrices
from kernels.weights.gated_in_two import GatedMatrix
from kernels.weights.linear import Gate, LinearWeight, Quantization, TableWeight
from kernels.weights.quantise import GROUP_SIZES
from services.common.cannot_start import CannotStart
from services.common.checkpoint_report import CheckpointReport
from services.common.pooling import PoolingSetting
from services.common.tokenizer_files.find import tokenizer_file
from services.frontend.generation.model_profile import ModelProfile
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.template_files import DEFAULT, TemplateFiles
from services.frontend.text.tokenizer import Tokenizer
from services.worker.engine.kv_cache import kv_block_bytes
from services.worker.engine.recurrent_state import Division, divide, state_bytes
from services.worker.models.checkpoint import Checkpoint, open_checkpoint
from services.worker.models.checkpoint_report import report_of
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.kv_groups import KVGroups
from services.worker.models.registry import read_stage
from services.worker.models.stage_place import StagePlace, layer_range
from services.worker.models.tensor_files import CheckpointError, TensorFiles
from services.worker.models.weights import Part, WantedTensors

MAX_TP = 64
"""Largest number of ranks of a stage for which the program tries whether the model can be divided.
"""
_CPU = torch.device("cpu")
_SCALE_BITS = 16
_ELEMENT_BITS: Mapping[Quantization, float] = {
    "int8": 8 + _SCALE_BITS / GROUP_SIZES[8],
    "int4": 4 + _SCALE_BITS / GROUP_SIZES[4],
}
"""Bits of memory for one element of a quantised matrix, including the element's share of its
group's scale."""


Grouped = Callable[[Sequence[Part]], int | None]
"""A function that returns the number of bytes of a matrix that is stored quantised in the
checkpoint's files. Returns None for any other matrix."""


class _Counted(WantedTensors):
    """The tensors that a rank needs. Also lists the matrices that are made of these tensors,
    because matrices may be quantised, and their bytes are then counted in another way."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__(tp_rank, tp_size)
        self.matrices: list[Sequence[Part]] = []
        self.mixtures: list[list[Sequence[Part]]] = []  # experts' matrices, never quantized

    def weight(self, parts: Sequence[Part], order: Tensor | None = None) -> LinearWeight:
        self.matrices.append(parts)
        return super().weight(parts, order)

    def gated(self, parts: Sequence[Part], gate: Gate) -> GatedMatrix:
        self.matrices.append(parts)
        return super().gated(parts, gate)

    def experts(self, gate_up: Sequence[Sequence[Part]], down: Sequence[Part]) -> ExpertMatrices:
        self.mixtures.append([*gate_up, *([part] for part in down)])
        return super().experts(gate_up, down)

    def stacked_experts(
        self, gate_up: Part, down: Part, order: Tensor, form: ExpertForm
    ) -> ExpertMatrices:
        self.mixtures.append([[gate_up], [down]])
        return super().stacked_experts(gate_up, down, order, form)

    def head(self, part: Part) -> LinearWeight:
        self.matrices.append([part])
        return super().head(part)

    def table(self, part: Part) -> TableWeight:
        self.matrices.append([part])
        return super().table(part)

    def rows(self, part: Part) -> TableWeight:
        self.matrices.append([part])
        return super().rows(part)


def inspect(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the facts about a checkpoint.

    The list under the key `refused` has the reasons why the checkpoint cannot be served, and the
    list under `advice` says what to do about each reason. Both lists are empty if the checkpoint
    can be served.
    """
    facts: dict[str, Any] = {"refused": [], "advice": []}
    for read in (_model, _layout, _report, _text):
        try:
            facts |= read(path, options)
        except (CannotStart, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            if reason not in facts["refused"]:
                facts["refused"].append(reason)
                facts["advice"].append(_advice(error))
    return facts


def _advice(error: Exception) -> str:
    """Returns a text that says how an operator can resolve an error."""
    if isinstance(error, CheckpointError):
        return "the files do not fit together: fetch the checkpoint again, or convert it again"
    if isinstance(error, UnsupportedModel):
        return (
            "choose another option if the reason names one, else convert the checkpoint to a form "
            "that docs/checkpoints.md lists"
        )
    return "look at the file that the reason names, and fetch it again if it is missing or cut"


def _model(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    opened = _open(path, options)
    config, files = opened.config, opened.files
    dtype = config.resolve_dtype(options.dtype)
    if not can_compute(options.quantization, _CPU):
        raise UnsupportedModel(f"quantization: {options.quantization} cannot be computed here")
    whole = _wanted(opened, dtype, range(config.n_layers), 0, 1)
    config.check()
    _grouped(files, config, whole, dtype, options)
    shapes = {part.name: part.n_elements for part in whole.parts}
    return {
        "family": config.architecture,
        "n_parameters": sum(shapes.values()),
        "n_layers": config.n_layers,
        "dtype": str(dtype).removeprefix("torch."),
        "checkpoint_dtype": config.checkpoint_dtype,
        "quantization": options.quantization,
        "load_format": options.load_format,
        "kv_bytes_per_token": _kv_bytes(config, range(config.n_layers), dtype, 1),
        "state_bytes_per_request": _state_bytes(config, range(config.n_layers), dtype, 1),
        "max_model_len": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "windows": sorted({window for window in config.layer_windows if window is not None}),
        "tp_sizes": [tp for tp in range(1, MAX_TP + 1) if _divides(opened, dtype, tp)],
        "vectors": None if opened.pooling is None else asdict(opened.pooling),
        "eos_token_ids": list(config.eos_token_ids),
    }


def _report(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the part of the facts that says where values come from, in which form matrices are
    stored, and what is ignored."""
    opened = _open(path, options)
    if options.load_format == "random":
        return CheckpointReport(opened.derived).facts()
    dtype = opened.config.resolve_dtype(options.dtype)
    return report_of(path, opened, dtype=dtype, quantization=options.quantization).facts()


def _layout(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the part of the facts about memory: how many bytes the weights of each rank take, and
    how many tokens fit into the K/V memory."""
    opened = _open(path, options)
    config, files = opened.config, opened.files
    dtype, n_stages = config.resolve_dtype(options.dtype), options.stages
    stages = [layer_range(config.n_layers, i, n_stages) for i in range(n_stages)]
    shares = [
        _wanted(opened, dtype, layers, rank, options.tp)
        for layers in stages
        for rank in range(options.tp)
    ]
    return {
        "rank_bytes": [
            _bytes_of(
                share, _grouped(files, config, share, dtype, options), dtype, options.quantization
            )
            for share in shares
        ],
        "kv_bytes_per_token_of_rank": max(
            _kv_bytes(config, layers, dtype, options.tp) for layers in stages
        ),
        "state_bytes_per_request_of_rank": max(
            _state_bytes(config, layers, dtype, options.tp) for layers in stages
        ),
        **_room(
            [
                divide(
                    options.kv_memory,
                    block_size=1,
                    block_bytes=_kv_bytes(config, layers, dtype, options.tp),
                    row_bytes=_state_bytes(config, layers, dtype, options.tp),
                )
                for layers in stages
            ]
        ),
    }


def _room(stages: Sequence[Division]) -> dict[str, Any]:
    """Returns the capacity of the pipeline's K/V memory, which is the smallest capacity of any
    stage.

    The capacity is a number of tokens and, for models with recurrent states, a number of requests.
    """
    n_rows = [stage.n_state_rows for stage in stages if stage.n_state_rows]
    return {
        "room_tokens": min(stage.n_kv_blocks for stage in stages),
        "room_requests": min(n_rows, default=None),
    }


def _open(path: Path, options: argparse.Namespace) -> Checkpoint:
    return open_checkpoint(path, load_format=options.load_format, pooling=options.pooling)


def _wanted(
    checkpoint: Checkpoint, dtype: torch.dtype, layers: range, rank: int, tp: int
) -> _Counted:
    """Returns the tensors that a rank would read from the checkpoint.

    Raises:
        UnsupportedModel: the model cannot be divided among `tp` ranks.
    """
    config, pooling = checkpoint.config, checkpoint.pooling
    place = StagePlace.of(config, layers, pooling, ops=ops_for(_CPU), tp_rank=rank, tp_size=tp)
    wanted = _Counted(rank, tp)
    read_stage(config, place, pooling, source=wanted, dtype=dtype, device=_CPU)
    return wanted


def _divides(checkpoint: Checkpoint, dtype: torch.dtype, tp: int) -> bool:
    config = checkpoint.config
    if tp > config.n_heads:
        return False
    layers = reversed(list(enumerate(zip(config.layer_kv, config.layer_states, strict=True))))
    first_of_kinds = {kind: layer for layer, kind in layers}
    try:
        for layer in first_of_kinds.values():  # and the layer whose K/V this one reads
            _wanted(checkpoint, dtype, range(config.kv_sources[layer], layer + 1), 0, tp)
    except UnsupportedModel:
        return False
    return True


def _grouped(
    files: TensorFiles,
    config: ModelConfig,
    wanted: WantedTensors,
    dtype: torch.dtype,
    options: argparse.Namespace,
) -> Grouped:
    """Returns the function that computes the sizes of matrices that are stored quantised. For
    random weights there are no files, so the function returns None for every matrix.

    Raises:
        CheckpointError: a tensor in the files has another form than the model needs.
    """
    if options.load_format == "random":
        return lambda parts: None
    source = CheckpointTensors(
        files,
        wanted,
        dtype=dtype,
        device=_CPU,
        on_progress=lambda done, total: None,
        quantization=options.quantization,
        weight_format=config.weight_format,
    )
    return source.grouped_bytes


def _bytes_of(
    share: _Counted, grouped: Grouped, dtype: torch.dtype, quantization: Quantization
) -> int:
    """Returns the number of bytes that a rank's weights take in memory. The size of a quantised
    matrix is its size after quantisation."""
    n_plain = sum(part.n_elements for part in share.parts)
    n_bytes = 0
    for parts in share.matrices:
        n_elements = sum(part.n_elements for part in parts)
        n_grouped = grouped(parts)
        if n_grouped is None:
            bits = _ELEMENT_BITS.get(quantization, 8 * dtype.itemsize)
            n_grouped = math.ceil(n_elements * bits / 8)
        n_bytes += n_grouped
        n_plain -= n_elements
    for matrices in share.mixtures:
        kept = [grouped(parts) for parts in matrices]
        if None not in kept:
            n_bytes += sum(n for n in kept if n is not None)
            n_plain -= sum(part.n_elements for parts in matrices for part in parts)
    return n_bytes + n_plain * dtype.itemsize


def _kv_bytes(config: ModelConfig, layers: range, dtype: torch.dtype, tp: int) -> int:
    """Returns the number of bytes that the keys and values of one token take on a rank, summed over
    all K/V groups."""
    n_bytes = kv_block_bytes(config, layers, block_size=1, dtype=dtype, tp_size=tp)
    return n_bytes * len(KVGroups.of(config).windows)


def _state_bytes(config: ModelConfig, layers: range, dtype: torch.dtype, tp: int) -> int:
    return state_bytes(config, layers, dtype=dtype, tp_size=tp)


def _text(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_model(path)
    template = ChatTemplate.from_model(path)
    written = ModelProfile(chat_template=template).message_format(tokenizer)
    has_tools = template is None or template.takes_tool_results
    source = None if template is None else TemplateFiles.of_model(path).places[DEFAULT]
    return {
        "tokenizer": tokenizer_file(path).name,
        "has_chat_template": template is not None,
        "chat_template_source": source,
        "tools": written.tools if has_tools else "none: the chat template takes no tools' results",
        "thinks": written.thinks,
    }


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m services.cli.inspection")
    made.add_argument("model", type=Path)
    made.add_argument("--dtype", default="auto")
    made.add_argument("--quantization", default="none")
    made.add_argument("--load-format", default="safetensors")
    made.add_argument("--pooling", choices=get_args(PoolingSetting), default="")
    made.add_argument("--stages", type=int, default=1)
    made.add_argument("--tp", type=int, default=1)
    made.add_argument("--kv-memory", type=int, default=1 << 30)
    return made


def main() -> int:
    """Prints the facts about a checkpoint. Returns the exit status.

    The status is 1 if the checkpoint cannot be served.
    """
    options = parser().parse_args()
    facts = inspect(options.model, options)
    sys.stdout.write(json.dumps(facts) + "\n")
    return 1 if facts["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
