"""A rank's shard of its stage: weights that are loaded once and kept for all epochs.

The settings and the device determine where the weights are, how much memory is left for keys and
values, and whether decodes are recorded as CUDA graphs. Each epoch has a new model runner on these
weights.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from orcinus.v1 import worker_pb2

from services.common.cannot_start import CannotStart
from services.common.tokenizer_files.find import tokenizer_file
from services.grammar.grammars import Grammars
from services.worker.channel import MessageKind, RankEnd
from services.worker.engine import decode_graphs, warm_up
from services.worker.engine.input_batch import BatchBuilder
from services.worker.engine.kv_file import KVFile
from services.worker.engine.model_runner import ModelRunner
from services.worker.models import StageModel
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.adapters.text_files import check_text_files
from services.worker.models.checkpoint import load_stage
from services.worker.models.weight_cache import WeightCache, in_background
from services.worker.models.weights import OnProgress
from services.worker.rank.activity import Activity
from services.worker.rank.adapter_loader import NO_LOADER, AdapterLoader, NoLoader
from services.worker.rank.build import build_digest
from services.worker.rank.data_plane.rendezvous import join
from services.worker.rank.data_plane.staging import StagedTransport
from services.worker.rank.data_plane.transport import (
    RankPlace,
    TransferError,
    Transport,
)
from services.worker.rank.device_clock import DeviceClock, HostClock, StreamClock
from services.worker.rank.epoch_adapters import EpochAdapters
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.kv_journal import NO_JOURNAL, Journal, KVJournal
from services.worker.rank.shard_memory import ShardMemory
from services.worker.settings import RankSettings

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
"""Interval in seconds between two reports of the progress of loading."""

RECORDING_LIMIT_S = 1.0
"""Seconds for which decodes are recorded as CUDA graphs at the beginning of an epoch."""


class StageShard:
    """Holds one rank's weights on its device, and makes a new `EpochMember` for each epoch."""

    def __init__(
        self,
        settings: RankSettings,
        model: StageModel,
        *,
        new_graphs: Callable[[], Callable[[], decode_graphs.Graph]] | None = None,
        batch_builder: type[BatchBuilder] = BatchBuilder,
        activity: Activity | None = None,
    ) -> None:
        """`new_graphs` is called for each epoch and returns a function that makes graphs (see
        `decode_graphs.cuda_graphs`). If it is None, decodes are not recorded as graphs. `activity`
        records the steps of each epoch's member."""
        self._settings = settings
        self._model = model
        self._new_graphs = new_graphs
        self._batch_builder = batch_builder
        self._activity = activity
        self._memory = ShardMemory(settings, model, records_graphs=new_graphs is not None)
        self._kv_file: KVFile | None = None
        self._adapter_loader = _adapter_loader(settings, model)
        self._journal: Journal = NO_JOURNAL
        self.grammars = _grammars(settings, model)
        """The grammars of the model, which outputs can follow. None if this rank does not sample or
        the model can follow no grammar."""

    @classmethod
    def load(
        cls,
        settings: RankSettings,
        channel: RankEnd,
        *,
        activity: Activity | None = None,
        batch_builder: type[BatchBuilder] = BatchBuilder,
    ) -> "StageShard":
        """Loads the weights of this rank, and reports the progress to the controller through
        `channel`."""
        device = device_of(settings)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the device of streams and events that name none
        model = load_stage(
            Path(settings.model),
            stage_index=settings.stage_index,
            n_stages=settings.n_stages,
            tp_rank=settings.tp_rank,
            tp_size=settings.tp_size,
            dtype=settings.dtype,
            load_format=settings.load_format,
            quantization=settings.quantization,
            activations=settings.activations,
            max_model_len=settings.max_model_len,
            cache=_weight_cache(settings),
            adapters=_adapters(settings),
            takes_adapters=settings.n_loaded_adapters > 0,
            pooling=settings.pooling,
            device=device,
            on_progress=_progress_to(channel),
        )
        new_graphs = decode_graphs.cuda_graphs if has_graphs(settings, model) else None
        return cls(
            settings, model, new_graphs=new_graphs, batch_builder=batch_builder, activity=activity
        )

    def compile_kernels(self) -> None:
        """Compiles the kernels of iterations on a GPU. Does nothing on a CPU."""
        if self._model.device.type == "cuda":
            warm_up.compile_kernels(
                self._model,
                n_tokens=self._settings.trial_tokens,
                block_size=self._settings.block_size,
                new_graph=self._new_graph(),
            )

    def describe(self, *, rendezvous_address: str) -> worker_pb2.DescribeResponse:
        """Returns the description of this rank for the scheduler.

        Raises:
            NoMemoryLeft: no memory is left for keys and values.
            CannotStart: the memory for keys and values is too small for one block and the states of
                one request.
        """
        settings, model = self._settings, self._model
        return worker_pb2.DescribeResponse(
            model=settings.served_model_name,
            stage_index=settings.stage_index,
            n_stages=settings.n_stages,
            tp_size=settings.tp_size,
            first_layer=model.first_layer,
            n_layers=model.n_layers,
            vocab_size=model.config.vocab_size,
            max_model_len=model.config.max_position_embeddings,
            eos_token_ids=model.config.eos_token_ids,
            can_follow_grammars=self.grammars is not None,
            records_decodes=self._new_graphs is not None,
            block_size=settings.block_size,
            kv_windows=_windows_on_wire(model),
            n_kv_blocks=self._memory.division.n_kv_blocks,
            n_state_rows=self._memory.division.n_state_rows,
            rendezvous_address=rendezvous_address,
        )

    def open_kv_file(self) -> None:
        """Opens the file for keys and values, if the settings name a directory for it. All epochs
        of this process use the file."""
        self._kv_file = self._memory.open_kv_file()
        if self._kv_file is not None:
            self._journal = KVJournal(self._kv_file.record)

    def enter(self, request: worker_pb2.JoinPipelineRequest, peers: Transport) -> EpochMember:
        """Returns the member of a new epoch. If decodes run as CUDA graphs, first records the most
        frequent batch shapes for about RECORDING_LIMIT_S seconds.

        Raises:
            TransferError: a rank of this stage is gone. `peers` is then closed.
        """
        settings, kv_file = self._settings, self._kv_file
        if kv_file is not None:
            kv_file.begin(request.n_kv_blocks)
        runner = ModelRunner(
            self._model,
            n_kv_blocks=request.n_kv_blocks,
            block_size=settings.block_size,
            tensor_parallel=peers.tensor_parallel,
            batch_builder=self._batch_builder,
            grammars=self.grammars,
            new_graph=self._new_graph(),
            max_graph_batch_size=settings.max_graph_batch_size,
            n_state_rows=self._memory.division.n_state_rows,
            allocate_kv=None if kv_file is None else kv_file.allocate,
            max_loaded_adapters=settings.n_loaded_adapters,
        )
        member = EpochMember(
            request,
            runner,
            peers,
            self._clock(),
            self._activity,
            self._journal,
            EpochAdapters(self._adapter_loader, runner, [one.digest for one in self._model.fitted]),
        )
        if runner.graphs is not None:
            try:
                warm_up.record_decodes(
                    runner.graphs, peers.tensor_parallel, limit_s=RECORDING_LIMIT_S
                )
            except TransferError:
                member.close()
                raise
        return member

    def _new_graph(self) -> Callable[[], decode_graphs.Graph] | None:
        return None if self._new_graphs is None else self._new_graphs()

    def _clock(self) -> DeviceClock:
        device = self._model.device
        runs_ahead = device.type == "cuda" and not is_staged(self._settings)
        return StreamClock() if runs_ahead else HostClock(device)


def _adapter_loader(settings: RankSettings, model: StageModel) -> AdapterLoader | NoLoader:
    if not settings.n_loaded_adapters or model.adaptable is None:
        return NO_LOADER
    return AdapterLoader(settings, model.adaptable)


def _adapters(settings: RankSettings) -> list[Adapter]:
    """Returns the adapters that the settings name.

    Raises:
        AdapterError: an adapter cannot be served, or was trained with another tokenizer or chat
            template.
    """
    for name, directory in settings.adapters:
        check_text_files(name, directory, settings.model)
    return [Adapter(name, directory) for name, directory in settings.adapters]


def _windows_on_wire(model: StageModel) -> list[int]:
    """Returns the windows of the K/V groups for the rank's description, with 0 for a group without
    a window. The list is empty if the model has only one group and this group has no window."""
    windows = model.kv_groups.windows
    return [] if windows == (None,) else [window or 0 for window in windows]


def _grammars(settings: RankSettings, model: StageModel) -> Grammars | None:
    """Returns the grammars of the model, which outputs can follow.

    Returns None on a rank that does not sample, if the checkpoint has no token that ends an output,
    or if it has no tokenizer that llguidance can read.
    """
    file = tokenizer_file(settings.model)
    eos_token_ids = model.config.eos_token_ids
    if not (model.has_head and eos_token_ids and file.is_file()):
        return None
    try:
        return Grammars(file, vocab_size=model.config.vocab_size, eos_token_ids=eos_token_ids)
    except ValueError as error:
        log.warning("outputs can follow no formats: %s: %s", file, error)
        return None


def device_of(settings: RankSettings) -> torch.device:
    """Returns the device of this rank. On GPUs its number is `tp_rank` modulo the number of GPUs.

    Raises:
        CannotStart: PyTorch finds no GPU.
    """
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotStart("device cuda: PyTorch finds no GPU that it can use")
    return torch.device("cuda", settings.tp_rank % torch.cuda.device_count())


def is_staged(settings: RankSettings) -> bool:
    """Returns whether GPU tensors are transferred through CPU memory. The host then waits for
    transfers."""
    return settings.device == "cuda" and settings.data_plane == "gloo"


def has_graphs(settings: RankSettings, model: StageModel) -> bool:
    """Returns whether batches of decodes are recorded as CUDA graphs.

    This requires that the settings allow graphs, the device is a GPU, the host does not wait for
    transfers, and the model generates tokens. The shapes of operations must not depend on the
    contents of a batch. So there must also be no adapters, and none that can be loaded: the shapes
    of their products depend on which tokens have which adapter.
    """
    has_adapters = bool(settings.adapters) or settings.n_loaded_adapters > 0
    is_possible = settings.device == "cuda" and not (is_staged(settings) or has_adapters)
    generates = model.has_head or not model.is_last
    return settings.cuda_graphs and is_possible and generates and model.ops.has_fixed_shapes


def join_peers(settings: RankSettings, request: worker_pb2.JoinPipelineRequest) -> Transport:
    """Waits for the other ranks of an epoch and returns the transport to them.

    Raises:
        TransferError: the other ranks could not be reached.
    """
    device = device_of(settings)
    peers = join(
        RankPlace(
            pipeline_id=request.pipeline_id,
            epoch=request.epoch,
            stage_index=request.stage_index,
            n_stages=len(request.members),
            tp_rank=settings.tp_rank,
            tp_size=request.tp_size,
        ),
        rendezvous_address=request.rendezvous_address,
        data_host=settings.data_host,
        device=torch.device("cpu") if is_staged(settings) else device,
        timeout_s=settings.transfer_timeout_s,
    )
    return StagedTransport(peers) if is_staged(settings) else peers


def _weight_cache(settings: RankSettings) -> WeightCache | None:
    if settings.weight_cache is None:
        return None
    return WeightCache(
        settings.weight_cache,
        max_bytes=settings.weight_cache_bytes,
        build=build_digest(),
        run=in_background,
    )


def _progress_to(channel: RankEnd) -> OnProgress:
    last_report = 0.0

    def on_progress(n_done: int, n_total: int) -> None:
        nonlocal last_report
        now = time.monotonic()
        if n_done == n_total or now - last_report >= PROGRESS_INTERVAL_S:
            last_report = now
            channel.send(MessageKind.PROGRESS, f"{n_done} {n_total}".encode())

    return on_progress
