"""A rank: one device's shard of one stage, in a process of its own.

`python -m services.worker.rank FD FD SETTINGS`, started by the controller. It loads its weights
once, joins epochs as it is told, and runs one plan after the other. When the transport fails, or
the controller calls the epoch off, the epoch is over: it drops groups and K/V, keeps its weights
and waits for the next epoch. Any other error ends the process.
"""

import hashlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from orcinus.v1 import worker_pb2
from torch.distributed import TCPStore

from kernels import TORCH
from services.common import process
from services.common.telemetry import configure_logging
from services.worker import decode_graphs, transport, wire
from services.worker.build import build_digest
from services.worker.channel import ChannelClosed, MessageKind, RankEnd
from services.worker.device_clock import HostClock, StreamClock
from services.worker.epoch_entry import EpochEntry
from services.worker.epoch_member import EpochMember, Finished
from services.worker.kv_cache import kv_block_bytes
from services.worker.kv_memory import DeviceMemory, GpuMemory, measure, transfer_bytes
from services.worker.lifeline import Lifeline
from services.worker.model_runner import ModelRunner
from services.worker.models import StageModel, checkpoint_digest
from services.worker.models.checkpoint import load_stage
from services.worker.profiler import Profiler
from services.worker.sampler import NonFiniteLogits
from services.worker.settings import RankSettings
from services.worker.staging import StagedTransport
from services.worker.trial_iteration import TrialIteration, trial_lengths
from services.worker.warm_up import compile_kernels, record_decodes

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
"""How often timings are reported."""

PROGRESS_INTERVAL_S = 0.1

JOIN_TIMEOUT_S = 40.0
"""For finding the other ranks and a first exchange; less than the controller's, which hears why."""

RECORDING_LIMIT_S = 1.0
"""For recording decodes when an epoch begins."""


class Rank:
    """Does what the controller says, until the controller is gone."""

    def __init__(
        self,
        channel: RankEnd,
        description: worker_pb2.DescribeResponse,
        *,
        rendezvous: TCPStore | None,
        report_results: bool,
        connect: Callable[[worker_pb2.JoinPipelineRequest], transport.Transport],
        enter: Callable[[worker_pb2.JoinPipelineRequest, transport.Transport], EpochMember],
    ) -> None:
        self._channel = channel
        self._description = description
        self._rendezvous = rendezvous  # the store lives as long as this object
        self._reports = report_results
        self._connect = connect  # called in a thread of its own
        self._enter = enter
        self._member: EpochMember | None = None
        self._entry: EpochEntry | None = None
        self._first_epoch = 0  # those before it are over
        self._leaving = threading.Lock()  # for the two above
        self._timings: list[worker_pb2.IterationTiming] = []
        self._reported_at = time.monotonic()
        self._profiler = Profiler()

    def leave(self, before: int | None) -> None:
        """All epochs before the given one are over, or all if there is none: wherever the rank
        waits for other ranks, it stops. Called in another thread than `serve`."""
        with self._leaving:
            self._first_epoch = max(self._first_epoch, sys.maxsize if before is None else before)
            entry = self._entry
        if entry is not None and entry.epoch < self._first_epoch:
            entry.call_off(f"epoch {entry.epoch} is over")

    def serve(self) -> NoReturn:
        """Runs until the channel is closed.

        Raises:
            ChannelClosed: it is.
        """
        self._channel.send(MessageKind.LOADED, self._description.SerializeToString())
        while True:
            try:
                self._take_in_messages()
                self._run_next()
                self._finish_profile()
            except transport.TransferError as error:
                self._abandon(str(error))
            if time.monotonic() - self._reported_at >= REPORT_INTERVAL_S:
                self._report_timings()

    def _take_in_messages(self) -> None:
        """All messages that are there; waits for one if there is nothing to start or to finish."""
        member = self._member
        is_busy = member is not None and bool(member.n_announced or member.n_started)
        message = self._channel.receive(0 if is_busy else REPORT_INTERVAL_S)
        while message is not None:
            self._handle(*message)
            message = self._channel.receive(0)

    def _handle(self, kind: MessageKind, payload: bytes) -> None:
        if kind is MessageKind.PLAN:
            self._announce(worker_pb2.RunIterationsRequest.FromString(payload))
        elif kind is MessageKind.JOIN:
            self._join(worker_pb2.JoinPipelineRequest.FromString(payload))
        elif kind is MessageKind.PROFILE:
            n_iterations, _, path = payload.decode().partition(" ")
            self._profiler.order(int(n_iterations), path)

    def _join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        self._leave()
        self._timings.clear()
        try:
            entry = self._open(request)
            self._member = self._enter(request, entry.wait(JOIN_TIMEOUT_S))
        except transport.TransferError as error:
            self._channel.send(MessageKind.NOT_JOINED, f"{request.epoch} {error}".encode())
        else:
            self._channel.send(MessageKind.JOINED, str(request.epoch).encode())

    def _open(self, request: worker_pb2.JoinPipelineRequest) -> EpochEntry:
        with self._leaving:
            if request.epoch < self._first_epoch:
                raise transport.TransferError(f"epoch {request.epoch} is over")
            self._entry = EpochEntry(request.epoch, lambda: self._connect(request))
            return self._entry

    def _leave(self) -> None:
        with self._leaving:
            self._entry = None
        if self._member is not None:
            self._member.close()
            self._member = None

    def _announce(self, message: worker_pb2.RunIterationsRequest) -> None:
        member = self._member
        if member is None or (message.pipeline_id, message.epoch) != (
            member.request.pipeline_id,
            member.request.epoch,
        ):
            log.warning("refused a plan of epoch %d", message.epoch)
        else:
            member.announce(message)

    def _run_next(self) -> None:
        member = self._member
        if member is None:
            return
        if member.n_started:  # on a GPU, which may have finished while the host did other things
            self._report_finished(member)
        if member.n_announced:
            with self._profiler:
                member.start_next()
        self._report_finished(member)

    def _report_finished(self, member: EpochMember) -> None:
        try:
            all_finished = member.take_finished()
        except NonFiniteLogits:
            self._check_epoch()  # what was not received when it ended is anything
            raise
        self._check_epoch()
        if self._reports:
            for finished in all_finished:
                self._report(member.request, finished)

    def _check_epoch(self) -> None:
        if self._entry is not None and self._entry.is_over:
            raise transport.TransferError("called off")  # NCCL aborts without an error

    def _report(self, place: worker_pb2.JoinPipelineRequest, finished: Finished) -> None:
        if finished.token_ids is None:
            self._timings.append(finished.timing)
        else:
            self._send_report(wire.result_of(place, finished.timing, finished.token_ids))
        if finished.trace is not None:
            self._channel.send(MessageKind.TRACE, finished.trace.SerializeToString())

    def _finish_profile(self) -> None:
        try:
            path = self._profiler.take()
        except OSError as error:
            self._channel.send(MessageKind.NOT_PROFILED, str(error).encode())
        else:
            if path is not None:
                self._channel.send(MessageKind.PROFILED, path.encode())

    def _report_timings(self) -> None:
        self._reported_at = time.monotonic()
        if self._member is not None and self._timings:
            self._send_report(wire.timings_of(self._member.request, self._timings))
            self._timings.clear()

    def _abandon(self, reason: str) -> None:
        member, entry = self._member, self._entry
        self._leave()
        if member is None:
            return
        if entry is not None and entry.is_over:
            log.info("left epoch %d, which is over", member.request.epoch)
            return
        log.error("left the epoch: %s", reason)
        self._send_report(
            worker_pb2.WatchStageResponse(
                pipeline_id=member.request.pipeline_id,
                epoch=member.request.epoch,
                failure=worker_pb2.StageFailure(reason=reason),
            )
        )

    def _send_report(self, report: worker_pb2.WatchStageResponse) -> None:
        self._channel.send(MessageKind.REPORT, report.SerializeToString())


def device_of(settings: RankSettings) -> torch.device:
    """The device of this rank: on GPUs, the one with the number of its shard, shared if
    there are not as many."""
    if settings.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", settings.tp_rank % torch.cuda.device_count())


def is_staged(settings: RankSettings) -> bool:
    """Whether tensors of a GPU travel by way of the CPU, for which the host waits."""
    return settings.device == "cuda" and settings.data_plane == "gloo"


def has_graphs(settings: RankSettings, model: StageModel) -> bool:
    """Whether batches of decodes are recorded; PyTorch's own operations have shapes that depend on
    what is in a batch."""
    is_possible = settings.device == "cuda" and not is_staged(settings) and model.ops is not TORCH
    return settings.cuda_graphs and is_possible and settings.batching == "selective"


def load(settings: RankSettings, channel: RankEnd) -> StageModel:
    """Loads this rank's weights and tells the controller how far it is."""
    last_report = 0.0

    def on_progress(n_done: int, n_total: int) -> None:
        nonlocal last_report
        now = time.monotonic()
        if n_done == n_total or now - last_report >= PROGRESS_INTERVAL_S:
            last_report = now
            channel.send(MessageKind.PROGRESS, f"{n_done} {n_total}".encode())

    return load_stage(
        Path(settings.model),
        stage_index=settings.stage_index,
        n_stages=settings.n_stages,
        tp_rank=settings.tp_rank,
        tp_size=settings.tp_size,
        dtype=settings.dtype,
        load_format=settings.load_format,
        quantization=settings.quantization,
        device=device_of(settings),
        on_progress=on_progress,
    )


def kv_memory_of(
    settings: RankSettings, model: StageModel, memory: Callable[[], DeviceMemory] = GpuMemory
) -> int:
    """Bytes for keys and values: what is set, or what the device has left.

    Raises:
        NoMemoryLeft: it has none.
    """
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    lengths = trial_lengths(settings.trial_tokens, model.config.max_position_embeddings)
    trial = TrialIteration(model, lengths, block_size=settings.block_size)
    n_transfer_bytes = transfer_bytes(
        settings.trial_tokens * model.hidden_size * model.dtype.itemsize,
        stage_index=settings.stage_index,
        n_stages=settings.n_stages,
        max_pending_sends=transport.MAX_PENDING_SENDS,
    )
    n_graph_bytes = 0
    if has_graphs(settings, model):
        n_results = model.config.vocab_size if model.is_last else model.hidden_size
        n_graph_bytes = decode_graphs.reserved_bytes(
            settings.max_graph_batch_size, n_results * torch.float32.itemsize
        )
    shares = measure(memory(), trial.run, transfers=n_transfer_bytes, graphs=n_graph_bytes)
    left = shares.kv_memory(settings.device_memory_fraction)
    log.info("%d MiB are left for keys and values; in bytes, %s", left >> 20, shares)
    return left


def describe(
    settings: RankSettings,
    model: StageModel,
    rendezvous: TCPStore | None,
    *,
    kv_memory_bytes: int,
) -> worker_pb2.DescribeResponse:
    """What the scheduler must know of this rank."""
    block_bytes = kv_block_bytes(
        model.config,
        model.n_layers,
        block_size=settings.block_size,
        dtype=model.dtype,
        tp_size=settings.tp_size,
    )
    n_kv_blocks = kv_memory_bytes // block_bytes
    if n_kv_blocks == 0:
        raise SystemExit(
            f"kv_memory: {kv_memory_bytes} bytes are less than one block "
            f"of {settings.block_size} slots, {block_bytes} bytes"
        )
    return worker_pb2.DescribeResponse(
        model=settings.served_model_name,
        fingerprint=fingerprint(settings, model),
        stage_index=settings.stage_index,
        n_stages=settings.n_stages,
        tp_size=settings.tp_size,
        first_layer=model.first_layer,
        n_layers=model.n_layers,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_position_embeddings,
        eos_token_ids=model.config.eos_token_ids,
        block_size=settings.block_size,
        n_kv_blocks=n_kv_blocks,
        rendezvous_address=f"{settings.data_host}:{rendezvous.port}" if rendezvous else "",
    )


def fingerprint(settings: RankSettings, model: StageModel) -> str:
    """Tells pipelines apart that must not mix: build, model, element types, checkpoint."""
    parts = (
        build_digest(),
        torch.__version__,
        model.config.fingerprint(model.dtype),
        settings.quantization,
        "random" if settings.load_format == "random" else checkpoint_digest(settings.model),
    )
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def start(settings: RankSettings, channel: RankEnd) -> Rank:
    """Loads the model and makes the rank that runs it."""
    rendezvous = None
    if settings.stage_index == 0 and settings.tp_rank == 0:
        rendezvous = transport.create_rendezvous(settings.data_host, settings.rendezvous_port)
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose streams and events are meant when none is named
    model = load(settings, channel)
    runs_ahead = device.type == "cuda" and not is_staged(settings)

    def new_graphs() -> Callable[[], decode_graphs.Graph] | None:
        return decode_graphs.cuda_graphs() if has_graphs(settings, model) else None

    def enter(request: worker_pb2.JoinPipelineRequest, peers: transport.Transport) -> EpochMember:
        runner = ModelRunner(
            model,
            n_kv_blocks=request.n_kv_blocks,
            block_size=settings.block_size,
            tensor_parallel=peers.tensor_parallel,
            batching=settings.batching,
            new_graph=new_graphs(),
            max_graph_batch_size=settings.max_graph_batch_size,
        )
        member = EpochMember(
            request, runner, peers, StreamClock() if runs_ahead else HostClock(device)
        )
        if runner.graphs is not None:
            try:
                record_decodes(runner.graphs, peers.tensor_parallel, limit_s=RECORDING_LIMIT_S)
            except transport.TransferError:
                member.close()
                raise
        return member

    if device.type == "cuda":  # and on a CPU there is nothing to compile
        compile_kernels(
            model,
            n_tokens=settings.trial_tokens,
            block_size=settings.block_size,
            new_graph=new_graphs(),
        )

    return Rank(
        channel,
        describe(settings, model, rendezvous, kv_memory_bytes=kv_memory_of(settings, model)),
        rendezvous=rendezvous,
        report_results=settings.tp_rank == 0,
        connect=lambda request: join_peers(settings, request),
        enter=enter,
    )


def join_peers(
    settings: RankSettings, request: worker_pb2.JoinPipelineRequest
) -> transport.Transport:
    """Meets the other ranks of an epoch."""
    device = device_of(settings)
    peers = transport.join(
        transport.Place(
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


def main(make_rank: Callable[[RankSettings, RankEnd], Rank] = start) -> NoReturn:
    channel, lifeline = (RankEnd(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    process.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which ends this
    settings = RankSettings.model_validate_json(sys.argv[3])
    configure_logging(
        f"rank {settings.stage_index}.{settings.tp_rank}",
        settings.log_level,
        log_format=settings.log_format,
    )
    try:
        rank = make_rank(settings, channel)
        Lifeline(lifeline).start(rank.leave)
        rank.serve()
    except ChannelClosed:
        # At once: to end the interpreter under threads that are inside torch is fatal.
        os._exit(0)
    except BaseException as error:
        channel.send(MessageKind.FAILURE, f"{type(error).__name__}: {error}".encode())
        raise


if __name__ == "__main__":
    main()
