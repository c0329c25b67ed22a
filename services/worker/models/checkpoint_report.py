"""Makes the report about a checkpoint: which of its files, keys and tensors are used, and how.

Only the headers of tensors are read. Weights are read only to compare a head with the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels import ops_for
from kernels.weights.linear import Quantization
from services.common.checkpoint_report import CheckpointReport
from services.common.gguf.header import is_gguf
from services.common.pooling import Pooling
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config import ModelConfig
from services.worker.models.registry import FAMILIES, read_stage
from services.worker.models.stage_place import StagePlace
from services.worker.models.tensor_files import TensorFiles, TensorFilesView
from services.worker.models.weights import Part, WantedTensors

# Files that a service reads, and files for people.
_READ = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template|tekken|modules|model\.safetensors\.index|pytorch_model\.bin\.index)\.json"
    r"|\d+_(Pooling|Normalize)|chat_template\.jinja|additional_chat_templates|merges\.txt|tokenizer\.model"
)
_FOR_PEOPLE = re.compile(
    r"\..*|.*\.(md|txt|png|jpe?g|svg|pdf|html)|LICEN[CS]E.*|NOTICE.*|USE_POLICY.*", re.IGNORECASE
)
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h)\.\d+\.(?P<kind>.+?)(?:\.weight)?")
_NUMBER = re.compile(r"\.\d+(?=\.)")


class _WatchedFiles(TensorFilesView):
    """Tensor files that record which tensors were looked up and found."""

    def __init__(self, files: TensorFiles) -> None:
        super().__init__(files)
        self.found: set[str] = set()

    def __str__(self) -> str:
        return str(self._files)

    def find(self, name: str) -> str | None:
        found = super().find(name)
        if found is not None:
            self.found.add(found)
        return found


def report_of(
    model: Path, checkpoint: Checkpoint, *, dtype: torch.dtype, quantization: Quantization = "none"
) -> CheckpointReport:
    """Returns the report about an open checkpoint.

    Raises:
        UnsupportedModel: the model has a feature that is not implemented.
        CheckpointError: a tensor is missing, or has another form than the model needs.
    """
    config = checkpoint.config
    wanted, files = whole_model(config, dtype, checkpoint.pooling), _WatchedFiles(checkpoint.files)
    if is_gguf(model):
        # The forms of GGUF files are found by the class of the files.
        watched: TensorFiles = checkpoint.files
    else:
        watched = files
    tensors = CheckpointTensors(
        watched,
        wanted,
        dtype=dtype,
        device=torch.device("cpu"),
        on_progress=lambda n_done, n_total: None,
        quantization=quantization,
        weight_format=config.weight_format,
    )
    head = files.find(FAMILIES[config.architecture].head_name)  # read to be compared, if tied
    unread = sorted(set(files.names()) - files.found - {head})
    ignored = {
        "files": _ignored_files(model, files),
        "keys of config.json": list(checkpoint.ignored_keys),
        "tensors": unread,
    }
    return CheckpointReport(
        checkpoint.derived,
        _layers(tensors, wanted.parts),
        {what: names for what, names in ignored.items() if names},
    )


def whole_model(
    config: ModelConfig, dtype: torch.dtype, pooling: Pooling | None = None
) -> WantedTensors:
    """Returns the tensors that a single rank needs to compute all layers, and to make vectors
    (embeddings or scores) if `pooling` is given. Raises UnsupportedModel for features that are not
    implemented."""
    device = torch.device("cpu")
    place = StagePlace.of(config, range(config.n_layers), pooling, ops=ops_for(device))
    wanted = WantedTensors(0, 1)
    read_stage(config, place, pooling, source=wanted, dtype=dtype, device=device)
    return wanted


def _layers(tensors: CheckpointTensors, parts: Sequence[Part]) -> dict[str, list[str]]:
    """Returns the kinds of matrices in layers, such as `self_attn.q_proj`, grouped by how they are
    stored. The keys are descriptions such as "4 bits in groups of 128". The kinds are in the order
    in which a layer reads them."""
    kinds: dict[str, dict[str, None]] = {}
    for part in parts:
        found = _LAYER.fullmatch(part.name)
        if found is not None and len(part.shape) > 1:
            kind = _NUMBER.sub("", found["kind"])
            kinds.setdefault(tensors.form_in_words(part), {})[kind] = None
    return {form: list(of_form) for form, of_form in kinds.items()}


def _ignored_files(model: Path, files: TensorFiles) -> list[str]:
    """Returns the names of files in the checkpoint's directory that are not read."""
    if is_gguf(model):
        return []
    weights = {path.name for path in files.paths()}
    return sorted(
        path.name
        for path in model.iterdir()
        if not _READ.fullmatch(path.name)
        and not _FOR_PEOPLE.fullmatch(path.name)
        and path.name not in weights
    )
