"""Files of weights, whole: safetensors headers and the index of several files."""

import contextlib
import json
import struct
import tempfile
from pathlib import Path

import torch

from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.directory_files import DirectoryFiles, checkpoint_digest
from services.worker.models.tensor_files import CheckpointError
from services.worker.models.weights import TensorSource, WantedTensors
from tests.fuzz.coverage.target import Choices, Target, any_bytes

HEADER = {
    "w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]},
    "v": {"dtype": "BF16", "shape": [8], "data_offsets": [48, 64]},
    "__metadata__": {"format": "pt"},
}
INDEX = {
    "metadata": {"total_size": 64},
    "weight_map": {"w": "model-1.safetensors", "v": "model-1.safetensors"},
}
_DIRECTORY = tempfile.TemporaryDirectory()


def run(data: bytes) -> None:
    """Writes a checkpoint of two tensors, some of it made up, and loads it."""
    choices = Choices(data)
    directory = Path(_DIRECTORY.name)
    place = choices.number(4)
    weights, header, index = bytes(64), dict(HEADER), json.dumps(INDEX)
    if place == 0:
        index = data[1:].decode(errors="surrogateescape")
    elif place == 1:
        index = json.dumps(choices.changed(INDEX, ("weight_map",)))
    if place in (1, 2):
        for name in list(header):
            if choices.number(2):
                header[name] = choices.changed(header[name], ("dtype", "shape", "data_offsets"))
        weights = bytes(choices.one_of([64, 0, 63, 65, 1024]))
    text = json.dumps(header).encode()
    length = choices.one_of([len(text)] * 4 + [0, 2**64 - 1, 2**63, 10**8, len(text) + 1, 2**32])
    file = struct.pack("<Q", length) + text + weights
    if place == 3:
        file = data[1:]
    (directory / "model-1.safetensors").write_bytes(file)
    path = directory / "model.safetensors.index.json"
    path.write_bytes(index.encode(errors="surrogateescape"))
    wanted = WantedTensors(0, 1)
    _read(wanted)
    with contextlib.suppress(CheckpointError):
        checkpoint_digest(directory)
    with contextlib.suppress(CheckpointError):
        tensors = CheckpointTensors(
            DirectoryFiles(directory),
            wanted,
            dtype=torch.float32,
            device=torch.device("cpu"),
            on_progress=lambda n_done, n_total: None,
        )
        _read(tensors)


def _read(source: TensorSource) -> None:
    source.tensor("w", 4, 3)
    source.tensor("v", 8)


_TEXT = json.dumps(HEADER).encode()
TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\1"),
        *any_bytes(b"\2"),
        b"\0" + json.dumps(INDEX).encode(),
        b"\3" + struct.pack("<Q", len(_TEXT)) + _TEXT + bytes(64),
        *(bytes([1, 0, field, 5, 3, 4]) for field in range(4)),
        *(bytes([2, 1, 0, field, 5, 4, 0, 0, size, length]) for field in range(4)
          for size in range(5) for length in (0, 5, 6, 7, 8)),
    ],
    words=['"weight_map":', '"dtype":', '"shape":', '"data_offsets":', "../", "/etc/passwd", "F32",
           "BF16", "F8_E4M3", "I64", ".safetensors", "__metadata__"],
)  # fmt: skip
