"""Many pipelines of one stage in one process: real controllers, whose ranks are timers.

A rank runs one plan after the other, each for the time of `null_model.py`. The tokens that it
samples differ from iteration to iteration. With a process for each controller and each rank,
sixteen pipelines would need more memory and processor time than a small machine has.

`null_plane.py` starts this module as a process.
"""

import argparse
import asyncio
import contextlib
import sys
from dataclasses import dataclass

from orcinus.v1 import worker_pb2

from benchmarks.control.null_model import compute_s, description
from services.arena.sleeping.sampled_tokens import FIRST_TOKEN_ID, N_TOKENS
from services.common import rpc, rpc_handlers
from services.common.process import ReadyPipe, die_with_parent, run, stop_event
from services.worker.channel import MessageKind
from services.worker.controller.controller import Controller
from services.worker.controller.service import RAW_METHODS, SERVICE, WorkerService
from services.worker.settings import PipelinePlace

HOST = "127.0.0.1"
BLOCK_SIZE = 16
HEARTBEAT_S = 0.5
SILENCE_LIMIT_S = 60.0  # on a machine with other work


@dataclass
class TimerRank:
    """A rank that computes nothing and reports each plan when the time of an iteration has
    passed."""

    controller: Controller
    iteration_s: float
    free_s: float = 0.0
    """Time of the event loop, in seconds, until which the rank is busy."""

    def load(self) -> None:
        """Reports to the controller that the model is loaded."""
        traits = worker_pb2.DescribeResponse(traits={"model": "null"})
        self.controller.on_message(0, MessageKind.TRAITS, traits.SerializeToString())
        loaded = description()
        loaded.n_stages = loaded.tp_size = loaded.n_layers = 1
        loaded.block_size = BLOCK_SIZE
        loaded.rendezvous_address = f"{HOST}:1"  # no other stage asks for it
        self.controller.on_message(0, MessageKind.LOADED, loaded.SerializeToString())

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Handles a message from the controller: joins an epoch at once, and reports a plan after
        the time of an iteration. Ignores all other messages."""
        if kind is MessageKind.JOIN:
            request = worker_pb2.JoinPipelineRequest.FromString(payload)
            self.controller.on_message(0, MessageKind.JOINED, str(request.epoch).encode())
        elif kind is MessageKind.PLAN:
            loop = asyncio.get_running_loop()
            self.free_s = max(self.free_s, loop.time()) + self.iteration_s
            loop.call_at(self.free_s, self._report, payload)

    async def beat(self) -> None:
        """Sends heartbeats to the controller until cancelled."""
        while True:
            self.controller.on_message(0, MessageKind.HEARTBEAT, b"")
            await asyncio.sleep(HEARTBEAT_S)

    def _report(self, payload: bytes) -> None:
        plan = worker_pb2.RunIterationsRequest.FromString(payload)
        report = worker_pb2.WatchStageResponse(pipeline_id=plan.pipeline_id, epoch=plan.epoch)
        report.result.iteration = report.result.timing.iteration = plan.iteration
        report.result.timing.compute_ns = round(1e9 * self.iteration_s)
        report.result.token_ids.extend(
            FIRST_TOKEN_ID + (plan.iteration + 17 * place) % N_TOKENS
            for place in range(sum(plan.sample) + sum(plan.n_drafts))
        )
        self.controller.on_message(0, MessageKind.REPORT, report.SerializeToString())


async def serve(n_stages: int, ready_fd: int) -> int:
    """Serves `n_stages` stages until the process receives a stop signal, and returns the exit
    status. Reports the addresses through the file descriptor `ready_fd`."""
    stop = stop_event()
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await _serve_stage(stack) for _ in range(n_stages)]
        ReadyPipe(ready_fd).report({"addresses": ",".join(addresses), "ready": True})
        await stop.wait()
    return 0


async def _serve_stage(stack: contextlib.AsyncExitStack) -> str:
    """Starts serving a stage, and returns the stage's address. The stage ends when `stack` is
    closed."""
    controller = Controller(tp_size=1, place=PipelinePlace(0, 1))
    rank = TimerRank(controller, compute_s())
    controller.attach([rank])
    rank.load()
    for living in (rank.beat(), controller.rank_watch.watch(SILENCE_LIMIT_S)):
        stack.callback(asyncio.create_task(living).cancel)
    server = rpc.create_server()
    handler = rpc_handlers.service_handler(SERVICE, WorkerService(controller), raw=RAW_METHODS)
    server.add_generic_rpc_handlers((handler,))
    address = rpc.bind(server, f"{HOST}:0")
    controller.name = address
    await server.start()
    stack.push_async_callback(server.stop, grace=0)
    stack.push_async_callback(controller.close)
    return address


def main() -> int:
    """Parses the command line and serves the stages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, required=True, help="number of stages")
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args()
    die_with_parent()
    return run(serve(options.n, options.ready_fd), ready_fd=options.ready_fd)


if __name__ == "__main__":
    sys.exit(main())
