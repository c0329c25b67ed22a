"""`python -m services.worker.rank FD FD SETTINGS`: a rank, started by its stage's controller.

The rank reports its traits, waits for a message that names its stage, and loads its weights. The
message usually comes long after torch has been imported.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from orcinus.v1 import worker_pb2

from kernels import native_ops
from services.common import process
from services.common.address import Address
from services.common.cannot_start import CannotStart
from services.common.checkpoint_report import CheckpointReport
from services.common.iteration_limit import IterationLimit
from services.common.telemetry import configure_logging
from services.worker.channel import ChannelClosed, MessageKind, RankEnd
from services.worker.engine.input_batch import BatchBuilder
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.checkpoint_report import report_of
from services.worker.models.config import UnsupportedModel
from services.worker.models.tensor_files import CheckpointError
from services.worker.rank.activity import Activity
from services.worker.rank.data_plane.rendezvous import create_rendezvous
from services.worker.rank.lifeline import Lifeline
from services.worker.rank.membership import Membership
from services.worker.rank.rank import Rank
from services.worker.rank.stage_shard import StageShard, join_peers
from services.worker.rank.traits import traits_of
from services.worker.settings import FreeRankSettings, PipelinePlace, RankSettings

log = logging.getLogger(__name__)

PLACE_WAIT_S = 3600.0
"""Timeout in seconds of one wait for the message with the rank's stage. After the timeout the rank
waits again."""


def start(
    settings: RankSettings,
    channel: RankEnd,
    activity: Activity,
    *,
    batch_builder: type[BatchBuilder] = BatchBuilder,
) -> Rank:
    """Loads the rank's weights and returns the rank. Benchmarks pass another `batch_builder`."""
    rendezvous, address = None, ""
    if settings.stage_index == 0 and settings.tp_rank == 0:
        rendezvous = create_rendezvous(settings.data_host, settings.rendezvous_port)
        address = str(Address(settings.data_host, rendezvous.port))
    if settings.stage_index == 0 and settings.tp_rank == 0:
        tell_checkpoint(settings, channel)
    shard = StageShard.load(settings, channel, activity=activity, batch_builder=batch_builder)
    shard.compile_kernels()
    description = shard.describe(rendezvous_address=address)
    shard.open_kv_file()
    return Rank(
        channel,
        description,
        Membership(connect=partial(join_peers, settings), enter=shard.enter),
        rendezvous=rendezvous,
        report_results=settings.tp_rank == 0,
        tp_rank=settings.tp_rank,
        grammars=shard.grammars,
        activity=activity,
    )


def tell_checkpoint(settings: RankSettings, channel: RankEnd) -> None:
    """Logs the report about the checkpoint, and sends the report to the controller.

    Raises:
        CannotStart: the checkpoint cannot be served.
    """
    model = Path(settings.model)
    opened = open_checkpoint(
        model,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        pooling=settings.pooling,
    )
    report = CheckpointReport(opened.derived)
    if settings.load_format != "random":
        dtype = opened.config.resolve_dtype(settings.dtype)
        try:
            report = report_of(model, opened, dtype=dtype, quantization=settings.quantization)
        except (UnsupportedModel, CheckpointError, OSError) as error:
            # The report is about all stages, and this one may be able to load its own part.
            log.warning("no report about the whole checkpoint: %s", error)
    for name, text in report.rows():
        log.info("%s: %s", name, text)
    channel.send(MessageKind.CHECKPOINT, json.dumps(report.rows()).encode())


def given_place(channel: RankEnd) -> PipelinePlace:
    """Waits for the message with the rank's stage, and returns the stage.

    Raises:
        ChannelClosed: the worker ends before it has got a stage.
    """
    while (frame := channel.receive(PLACE_WAIT_S)) is None:
        pass
    kind, payload = frame
    assert kind is MessageKind.PLACE, kind
    return PipelinePlace.from_bytes(payload)


def main(
    make_rank: Callable[[RankSettings, RankEnd, Activity], Rank] = start,
    traits: Callable[[FreeRankSettings], Mapping[str, str]] = traits_of,
) -> NoReturn:
    """Runs the rank that `make_rank` returns, until the controller closes the channel. Benchmarks
    pass other functions, for models without a checkpoint."""
    channel, second = (RankEnd(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    process.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    free = FreeRankSettings.model_validate_json(sys.argv[3])
    configure_logging(f"rank {free.tp_rank}", free.log_level, log_format=free.log_format)
    try:
        told = worker_pb2.DescribeResponse(traits=traits(free))
        channel.send(MessageKind.TRAITS, told.SerializeToString())
        if free.device == "cpu":
            native_ops()  # loads the library now: a spare may wait for its stage for long
        settings = free.at(given_place(channel))
        name = f"rank {settings.stage_index}.{settings.tp_rank}"
        configure_logging(name, settings.log_level, log_format=settings.log_format)
        limit = IterationLimit(floor_s=settings.hang_limit_s, ceiling_s=settings.transfer_timeout_s)
        activity = Activity(limit)
        lifeline = Lifeline(second, activity)
        lifeline.start()
        with torch.inference_mode():  # entering it for each iteration would cost 0.1 ms
            rank = make_rank(settings, channel, activity)
            lifeline.attach(rank.membership.leave_before, rank.prepare_grammar)
            process.freeze_objects()
            rank.serve()
    except ChannelClosed:
        # Exits at once: ending the interpreter crashes while other threads are inside torch.
        os._exit(0)
    except CannotStart as error:
        say_last(channel, MessageKind.REFUSAL, str(error))
    except BaseException as error:
        # Logged before the controller is told, because the controller then kills this process.
        log.exception("this rank ends")
        say_last(channel, MessageKind.FAILURE, f"{type(error).__name__}: {error}")
    sys.exit(1)


def say_last(channel: RankEnd, kind: MessageKind, reason: str) -> None:
    """Reports to the controller why this rank ends. Does nothing if the channel is already
    closed."""
    with contextlib.suppress(ChannelClosed):
        channel.send(kind, reason.encode())


if __name__ == "__main__":
    main()
