"""The traits of a rank: the properties that must be equal on all stages of a pipeline.

A rank reports its traits before it loads weights, so that a leader can select workers with equal
traits before it assigns them stages.
"""

from functools import cache
from pathlib import Path

import torch

from kernels import kernels_name
from services.common.adapters import adapter_traits
from services.common.cannot_start import CannotStart
from services.worker.models import checkpoint_digest, weights_digest
from services.worker.models.adapters.adapter import adapter_digest
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.directory_files import files_digest
from services.worker.rank.build import build_digest
from services.worker.settings import FreeRankSettings

N_DIGITS = 16
"""Number of hexadecimal digits of a digest in the traits. Further digits are cut off."""


def traits_of(settings: FreeRankSettings) -> dict[str, str]:
    """Returns the traits of a rank by their names. Reads the configuration and samples of the
    weights, or all weights if receipts are made.

    Raises:
        CannotStart: the checkpoint or an adapter cannot be read or is not supported.
    """
    checkpoint = open_checkpoint(
        Path(settings.model),
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        pooling=settings.pooling,
    )
    config, pooling = checkpoint.config, checkpoint.pooling
    is_random = settings.load_format == "random"
    return {
        "model": settings.served_model_name,
        "checkpoint": "random" if is_random else checkpoint_digest(settings.model)[:N_DIGITS],
        "configuration": config.fingerprint()[:N_DIGITS],
        "dtype": str(config.resolve_dtype(settings.dtype)).removeprefix("torch."),
        **settings_traits(settings),
        **({} if pooling is None else pooling.to_traits()),
        **adapter_traits(
            {name: adapter_digest(path) for name, path in settings.adapters},
            max_loaded=settings.n_loaded_adapters,
        ),
        **receipt_traits(settings, max_model_len=config.max_position_embeddings),
    }


def receipt_traits(settings: FreeRankSettings, *, max_model_len: int) -> dict[str, str]:
    """Returns the traits that only receipts (docs/receipts.md) need: the digest of the weights, the
    name of the kernels, and the length of the longest sequence in tokens. The result is empty if no
    receipts are made, because computing the digest takes time.

    Raises:
        CannotStart: the weights are random, so no receipt could be checked.
        CheckpointError: a weight file cannot be read.
    """
    if settings.receipts == "off":
        return {}
    if settings.load_format == "random":
        raise CannotStart("receipts: not with load_format random, whose weights have no digest")
    device = torch.device(settings.device)
    return {
        "weights": _weights_digest(settings.model, files_digest(settings.model)),
        "kernels": kernels_name(device),
        "max_model_len": str(max_model_len),
    }


@cache
def _weights_digest(model: Path, files: str) -> str:
    """Returns the digest of a checkpoint's weights. The computation takes seconds, so the result is
    kept for later calls in this process. `files` is a cheap digest of the checkpoint's files. It
    differs if a file has changed, so that the result is computed again."""
    return weights_digest(model)


def settings_traits(settings: FreeRankSettings) -> dict[str, str]:
    """Returns the traits that do not depend on the checkpoint."""
    is_nccl = settings.device == "cuda" and settings.data_plane != "gloo"
    return {
        "quantization": settings.quantization,
        "activations": settings.activations,
        "tp_size": str(settings.tp_size),
        "block_size": str(settings.block_size),
        "data_plane": "nccl" if is_nccl else "gloo",
        "code": build_digest()[:N_DIGITS],
        "torch": torch.__version__,
    }
