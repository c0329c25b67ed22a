"""A leading scheduler on real controllers with fake ranks, and a connection to it as a frontend has
one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from orcinus.v1 import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common import rpc, rpc_handlers
from services.scheduler.autoscaling import build_autoscaler
from services.scheduler.cluster.term import Unopposed
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.leader import HandOver, Leader
from services.scheduler.observing.metrics import SchedulerMetrics
from services.scheduler.observing.pace import Pace
from services.scheduler.observing.request_observer import RequestObservers
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
LIMIT_S = 30


class MovingStages:
    """The addresses of workers, which a test changes."""

    def __init__(self, n_stages: int) -> None:
        self.n_stages = n_stages
        self._addresses: list[str | None] = [None] * n_stages
        self._leaving: list[str] = []

    def place(self, index: int, address: str | None) -> None:
        self._addresses[index] = address

    def add(self, *addresses: str) -> None:
        self._addresses = [*filter(None, self._addresses), *addresses]

    def remove(self, address: str) -> None:
        self._addresses.remove(address)

    def terminate(self, *addresses: str) -> None:
        """Adds addresses of workers whose pods are terminating."""
        self._leaving += addresses

    def addresses(self) -> list[str]:
        return [address for address in self._addresses if address]

    def leaving(self) -> list[str]:
        return list(self._leaving)


class FewWorkers:
    """The wanted number of workers, kept in memory in place of a Deployment's scale."""

    def __init__(self, n_workers: int = 0) -> None:
        self.n_workers = n_workers

    async def read(self) -> int:
        return self.n_workers

    async def write(self, n_workers: int) -> None:
        self.n_workers = n_workers


class Scene:
    """A leader, the addresses of its stages, and a connection to the leader as a frontend has
    one."""

    def __init__(
        self,
        stages: MovingStages,
        address: str,
        stop: asyncio.Event,
        registry: CollectorRegistry,
        service: SchedulerService,
        leading: asyncio.Task[None],
    ) -> None:
        self.leading = leading
        self.stages = stages
        self.stop = stop
        self.registry = registry
        self.service = service
        self._channel = rpc.connect(address)
        self._stream = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Connect()

    async def read(self) -> scheduler_pb2.ConnectResponse:
        message: scheduler_pb2.ConnectResponse
        message = await asyncio.wait_for(self._stream.read(), LIMIT_S)
        return message

    async def until_open(self) -> None:
        while not (await self.read()).HasField("pipeline"):
            pass

    async def until_closed(self) -> list[scheduler_pb2.Completion]:
        completed: list[scheduler_pb2.Completion] = []
        while True:
            message = await self.read()
            completed += message.completed
            if message.is_closed:
                return completed

    async def submit(
        self, name: str, *, n_tokens: int, grammar: str | None = None, **known: Any
    ) -> None:
        """Submits a request. `known` are further fields of the submission, such as tokens that the
        request already has and their build."""
        submission = scheduler_pb2.Submission(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            max_new_tokens=n_tokens,
            sampling=sampling_pb2.SamplingParams(temperature=0, grammar=grammar),
            **known,
        )
        await self._stream.write(scheduler_pb2.ConnectRequest(submission=submission))

    async def sleep(self, state: scheduler_pb2.SleepState) -> scheduler_pb2.Sleep:
        """Waits for the message that the model is in the state `state`, asleep or starting, and
        returns it."""
        while (message := await self.read()).sleep.state != state:
            pass
        return message.sleep

    async def hold(self, n_requests: int) -> None:
        """Reports that the frontend holds `n_requests` requests until there is a pipeline."""
        demand = scheduler_pb2.Demand(n_requests=n_requests)
        await self._stream.write(scheduler_pb2.ConnectRequest(demand=demand))

    async def cancel(self, name: str) -> None:
        cancellation = scheduler_pb2.Cancellation(request_id=name)
        await self._stream.write(scheduler_pb2.ConnectRequest(cancellation=cancellation))

    async def outcome(self) -> tuple[int, int]:
        """Waits until a request has ended. Returns the number of tokens received meanwhile, and the
        reason of the end. There must be only one request."""
        n_tokens = 0
        while True:
            message = await self.read()
            n_tokens += sum(len(update.token_ids) for update in message.tokens)
            if message.completed:
                return n_tokens, message.completed[0].reason

    async def end(self) -> scheduler_pb2.Completion:
        """Waits for the next message that a request has ended, and returns its first end."""
        while not (completed := (await self.read()).completed):
            pass
        return completed[0]

    async def ends(self, count: int) -> dict[str, int]:
        """Waits until `count` requests have ended. Returns the reasons of their ends, by request
        id."""
        found: dict[str, int] = {}
        while len(found) < count:
            found |= {end.request_id: end.reason for end in (await self.read()).completed}
        return found

    async def builds(self, count: int) -> list[scheduler_pb2.RequestBuild]:
        """Waits for `count` messages about the build that makes the tokens of a request, and
        returns them."""
        found: list[scheduler_pb2.RequestBuild] = []
        while len(found) < count:
            found += (await self.read()).builds
        return found

    async def hang_up(self) -> None:
        self._stream.cancel()
        await self._channel.close()


@contextlib.asynccontextmanager
async def scene(
    n_stages: int,
    *,
    hand_over: HandOver | None = None,
    workers: FewWorkers | None = None,
    known: str = "",
    **settings: float | str,
) -> AsyncIterator[Scene]:
    """Yields a running leader without stages. `workers`, if given, is the number of workers that an
    autoscaler sets. `known` is the description of the model that an earlier leader has written, as
    text."""
    stages, stop = MovingStages(n_stages), asyncio.Event()
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    options = SchedulerSettings(n_stages=n_stages, **settings)  # type: ignore[arg-type]
    control = AdmissionControl(goal_s=None, is_fair=True)
    pace = Pace(control, options)
    requests = RequestObservers(metrics.requests, pace)
    service = SchedulerService(requests, control=control)
    service.known.restore(known)
    autoscaler = None
    if workers is not None:
        autoscaler = build_autoscaler(
            options,
            workers,
            n_stages=n_stages,
            control=control,
            service=service,
            on_wanted=metrics.note_wanted,
        )
    leads = Leader(
        options,
        stages,
        service,
        requests=requests,
        control=control,
        observe=[metrics.observe, pace.observe],
        hand_over=hand_over,
        autoscaler=autoscaler,
    )
    server = rpc.create_server()
    server.add_generic_rpc_handlers((rpc_handlers.service_handler(SERVICE, service),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    leading = asyncio.create_task(leads.lead(Unopposed(), stop))
    await asyncio.sleep(0)  # it leads from its first step on
    it = Scene(stages, address, stop, registry, service, leading)
    try:
        yield it
        stop.set()
        await asyncio.wait_for(leading, LIMIT_S)
    finally:
        leading.cancel()
        await it.hang_up()
        await server.stop(grace=0)
