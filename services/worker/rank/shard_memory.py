"""The memory that one rank's shard of a stage has for keys and values.

The settings say how many bytes keys and values take, or a trial iteration measures how many bytes
are left. Keys and values are in a file in memory if the settings name a directory for it, so that
they outlive the process.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import cached_property

import torch

from kernels.packing.stored import layout
from services.worker.engine import decode_graphs
from services.worker.engine.kv_cache import kv_block_bytes
from services.worker.engine.kv_file import KVFile, padded
from services.worker.engine.kv_memory import DeviceMemory, GpuMemory, measure, transfer_bytes
from services.worker.engine.recurrent_state import Division, divide, state_bytes
from services.worker.engine.trial_iteration import TrialIteration, trial_lengths
from services.worker.models import StageModel
from services.worker.models.directory_files import files_digest
from services.worker.rank.data_plane.transport import MAX_PENDING_SENDS
from services.worker.rank.traits import traits_of
from services.worker.settings import RankSettings

log = logging.getLogger(__name__)


class ShardMemory:
    """Determines the memory of one rank for keys and values and for the states of recurrent
    layers."""

    def __init__(self, settings: RankSettings, model: StageModel, *, records_graphs: bool) -> None:
        """`records_graphs` says whether decodes are recorded as CUDA graphs, for which memory must
        be left."""
        self._settings = settings
        self._model = model
        self._records_graphs = records_graphs

    @cached_property
    def division(self) -> Division:
        """The numbers of K/V blocks and state rows that fit into the memory of this rank. An epoch
        uses all state rows, but only as many blocks as fit on every stage."""
        settings, model = self._settings, self._model
        row_bytes = state_bytes(
            model.config, model.layers, dtype=model.dtype, tp_size=settings.tp_size
        )
        division = divide(
            self.kv_memory_bytes(),
            block_size=settings.block_size,
            block_bytes=self._kv_block_bytes,
            row_bytes=row_bytes,
        )
        if division.n_state_rows:
            log.info(
                "%d requests at a time have states of %d KiB each",
                division.n_state_rows,
                row_bytes >> 10,
            )
        return division

    def kv_memory_bytes(self, memory: Callable[[], DeviceMemory] = GpuMemory) -> int:
        """Returns the number of bytes for keys and values: the setting `kv_memory`, or all memory
        that the device has left if the setting is `auto`.

        Raises:
            NoMemoryLeft: the device has no memory left.
        """
        settings, model = self._settings, self._model
        if settings.kv_memory_bytes is not None:
            return settings.kv_memory_bytes
        lengths = trial_lengths(settings.trial_tokens, model.config.max_position_embeddings)
        trial = TrialIteration(model, lengths, block_size=settings.block_size)
        n_transfer_bytes = transfer_bytes(
            settings.trial_tokens * model.hidden_size * model.dtype.itemsize,
            stage_index=settings.stage_index,
            n_stages=settings.n_stages,
            max_pending_sends=MAX_PENDING_SENDS,
        )
        n_graph_bytes = 0
        if self._records_graphs:
            n_results = model.config.vocab_size if model.is_last else model.hidden_size
            n_graph_bytes = decode_graphs.reserved_bytes(
                settings.max_graph_batch_size, n_results * torch.float32.itemsize
            )
        shares = measure(memory(), trial.run, transfers=n_transfer_bytes, graphs=n_graph_bytes)
        left = shares.kv_memory(settings.device_memory_fraction)
        log.info("%d MiB are left for keys and values; in bytes, %s", left >> 20, shares)
        return left

    def open_kv_file(self) -> KVFile | None:
        """Opens the file for keys and values, and returns it. Returns None if the settings name no
        directory for the file or the file cannot be made. Then keys and values are in memory of
        this process, and are new in each epoch.

        Also returns None on a GPU, if no layer stores keys and values, and if layers keep a state
        of each request: the states do not outlive the process, and keys and values are useless
        without them.
        """
        settings, model, division = self._settings, self._model, self.division
        if settings.kv_directory is None or model.device.type != "cpu" or division.n_state_rows:
            return None
        n_bytes = (division.n_kv_blocks + 1) * self._kv_block_bytes  # one block is for padding
        if not n_bytes:
            return None
        try:
            file = KVFile.open(
                settings.kv_directory,
                stage=_stage_digest(settings),
                rank=settings.tp_rank,
                n_bytes=padded(n_bytes, n_tensors=2 * len(model.layers)),
            )
        except OSError as error:
            log.warning(
                "keys and values end with this process: kv_directory %s: %s",
                settings.kv_directory,
                error,
            )
            return None
        epoch = file.record.stored.epoch
        log.info("keys and values are in %s, which epoch %d wrote", file.path, epoch)
        return file

    @property
    def _kv_block_bytes(self) -> int:
        settings, model = self._settings, self._model
        return kv_block_bytes(
            model.config,
            model.layers,
            block_size=settings.block_size,
            dtype=model.dtype,
            tp_size=settings.tp_size,
        )


def _stage_digest(settings: RankSettings) -> str:
    """Returns a digest of everything that the keys and values of a stage depend on and that is
    equal on all ranks of the stage. It has 16 hexadecimal digits."""
    facts = {
        **traits_of(settings),
        "files": "" if settings.load_format == "random" else files_digest(settings.model),
        "stage": f"{settings.stage_index} of {settings.n_stages}",
        "layout": layout(),
        "load_format": settings.load_format,
    }
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]
