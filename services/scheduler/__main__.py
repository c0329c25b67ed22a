"""`python -m services.scheduler`: waits to be elected, leads, and lets another scheduler lead at
the end.

    bind → be elected → lead → give the lease away → serve until another has taken it

With static stages there is no election: this scheduler leads at once. In Kubernetes several
schedulers may run: one leads, the others stand by, and frontends find the leader by its health.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING
from uuid import uuid4

from orcinus.v1 import scheduler_pb2

from services.common import metrics, process, rpc, rpc_handlers, tls, tracing
from services.common.address import Address, parse
from services.common.ending import give_up
from services.common.errors import Unavailable
from services.common.health import Health
from services.common.serving import ServingWatch
from services.common.telemetry import configure_logging
from services.common.tracing import Tracing
from services.scheduler.autoscaling import build_autoscaler
from services.scheduler.building import BuildScheduler
from services.scheduler.cluster.deletion_costs import DeletionCosts
from services.scheduler.cluster.leader_elector import LeaderElector
from services.scheduler.cluster.leader_watch import LeaderWatch
from services.scheduler.cluster.leadership import LeadershipLost
from services.scheduler.cluster.observed_lease import RENEWAL
from services.scheduler.cluster.pod_directory import PodDirectory
from services.scheduler.cluster.replicas import ReplicaStore
from services.scheduler.cluster.stages import StaticStages, WorkerDirectory
from services.scheduler.cluster.term import ElectedTerm, Term, Unopposed
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.order.registry import ORDERS
from services.scheduler.core.policies.checked import BrokenRule
from services.scheduler.core.policies.registry import POLICIES
from services.scheduler.leader import HandOver, Leader
from services.scheduler.observing.iteration_tracer import Traces
from services.scheduler.observing.metrics import SchedulerMetrics
from services.scheduler.observing.pace import Pace
from services.scheduler.observing.progress import IterationProgress
from services.scheduler.observing.request_observer import RequestObservers
from services.scheduler.pipeline.deletion_order import costs_of
from services.scheduler.pipeline.forming import OnMembers
from services.scheduler.pipeline.shortfall import Shortfall, UnfitWorker
from services.scheduler.pipeline.spare_watch import SpareWatch
from services.scheduler.service import CALLERS, SchedulerService
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching import watch_service
from services.scheduler.watching.recording import recorded
from services.scheduler.watching.watch_service import WatchService
from services.scheduler.watching.watching import Watching

if TYPE_CHECKING:
    from services.scheduler.cluster.kubernetes_client import KubernetesClient

log = logging.getLogger(__name__)

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
FLUSH_S = 1.0  # for the last messages to frontends
READINESS_PERIOD_S = 0.5


class SchedulerProcess:
    """The process of a scheduler: creates the parts, connects them and runs them."""

    def __init__(
        self, settings: SchedulerSettings, traces: Tracing, build: BuildScheduler | None
    ) -> None:
        self._settings = settings
        self._build = build
        self._stop = process.stop_event()
        self._pipe = process.ReadyPipe(settings.ready_fd)
        self._health = Health(SERVICE.full_name)
        self._registry = metrics.new_registry()
        self._metrics = SchedulerMetrics(self._registry)
        self._traces = None
        if traces.is_on:
            self._traces = Traces(
                traces.tracer,
                policy=settings.policy,
                iterations_per_s=settings.traced_iterations_per_s,
            )
        self._control = AdmissionControl(
            goal_s=settings.first_token_goal_s,
            is_fair=ORDERS[settings.order].heeds_clients,
            vectors_yield=POLICIES[settings.policy].limits_vectors,
        )
        self._pace = Pace(self._control, settings)
        traced = () if self._traces is None else (self._traces.requests,)
        self._watching = Watching(settings)
        self._watch_service = WatchService(self._watching)
        self._requests = RequestObservers(
            self._metrics.requests, self._pace, self._watching.requests, *traced
        )
        self._service = SchedulerService(
            self._requests, control=self._control, max_frontends=settings.max_frontends
        )
        self._serving = ServingWatch(
            trouble=self._trouble,
            details=lambda: self._service.shortfall,
            n_waiting=lambda: self._progress.n_requests,
            progress="iteration",
        )
        self._progress = IterationProgress(on_iteration=self._serving.note_progress)
        self._metrics.ask_serving(self._serving.reason_against)
        self._metrics.ask_state(lambda: self._service.state)
        self._metrics.ask_queued(lambda: self._control.backlog.work.n_prompt_tokens)
        self._elector: LeaderElector | None = None
        self._on_members: OnMembers = lambda serving, draining: None
        self._has_handed_over = asyncio.Event()
        self._port = 0

    async def run(self) -> None:
        """Serves until this process gets a stop signal.

        Raises:
            Unavailable: there was no pipeline for `start_timeout_s` seconds.
            LeadershipLost: another scheduler leads.
        """
        with metrics.listening(
            self._settings.metrics_address, self._registry, is_healthy=self._health.is_healthy
        ) as address:
            async with self._recorded(), self._listening(metrics_address=address):
                await process.first_of(
                    self._serve(),
                    self._tell_readiness(),
                    self._serving.run(self._health.set_giving_tokens),
                )

    async def _serve(self) -> None:
        """Leads at once if the settings name the workers. Otherwise finds the workers among pods,
        and leads once elected."""
        if self._settings.stages:
            settings = self._settings
            stages = StaticStages(settings.stage_addresses, settings.n_stages)
            await self._lead(stages, Unopposed())
            return
        # The import takes half a second, and many seconds on a starved machine. So it runs in a
        # thread, and only in a scheduler that looks for pods.
        await asyncio.to_thread(import_module, "services.scheduler.cluster.kubernetes_client")
        from services.scheduler.cluster.kubernetes_client import KubernetesClient

        async with KubernetesClient() as client:
            pods = PodDirectory(
                client.pods(self._settings.namespace, self._settings.worker_selector),
                n_stages=self._settings.n_stages or 1,
                port=self._settings.worker_port,
            )
            namespace = self._settings.namespace
            costs = DeletionCosts(pods.pods, partial(client.set_deletion_cost, namespace))
            if self._settings.pod_deletion_cost:
                self._on_members = lambda *pipelines: costs.note(costs_of(*pipelines))
            await process.first_of(pods.run(), costs.run(), self._serve_in_turn(client, pods))

    async def _serve_in_turn(self, client: "KubernetesClient", pods: PodDirectory) -> None:
        """Waits until this scheduler is elected, and then leads as long as it holds the lease."""
        workers = None
        if (deployment := self._settings.worker_deployment) is not None:
            workers = client.scale(self._settings.namespace, deployment)
        if self._settings.lease_name is None:
            await self._lead(pods, Unopposed(), workers=workers)
            return
        self._elector = elector = self._candidate(client, self._settings.lease_name)
        watch = LeaderWatch(
            elector,
            pod_state=partial(client.pod_state, self._settings.namespace),
            renewal_s=RENEWAL * self._settings.retry_period_s,
        )
        acquiring = asyncio.create_task(_acquire(elector, watch))
        try:
            if await process.happens_before(acquiring, self._stop):
                term = ElectedTerm(acquiring.result(), elector)
                self._service.known.restore(elector.model)
                hand_over = partial(self._hand_over, elector)
                leading = self._lead(pods, term, hand_over=hand_over, workers=workers)
                await process.first_of(leading, _hold(elector), self._wait_for_successor(elector))
        finally:
            await elector.release()

    async def _hand_over(self, elector: LeaderElector) -> None:
        """Lets another scheduler lead. This scheduler keeps serving until the other one holds the
        lease."""
        await self._health.set_serving(False)
        self._metrics.set_leading(False)
        await elector.release()
        self._has_handed_over.set()

    async def _wait_for_successor(self, elector: LeaderElector) -> None:
        """Waits until another scheduler holds the lease that this one has given away. Then this
        scheduler stops leading and closes its connections to the stages, so that they join the next
        epoch sooner."""
        await self._has_handed_over.wait()
        await elector.wait_for_successor()

    def _candidate(self, client: "KubernetesClient", lease_name: str) -> LeaderElector:
        """Returns the elector of this process. A container that starts again in its pod gets a new
        identity, because its state is lost. Processes of the pod's earlier containers count as
        ended."""
        settings = self._settings
        container = f"{settings.pod_name}_{settings.pod_uid}_"
        return LeaderElector(
            client.lease_store(settings.namespace, lease_name),
            identity=container + uuid4().hex[:8],
            address=str(Address(settings.pod_ip, self._port)) if settings.pod_ip else "",
            predecessors=container if settings.pod_uid else "",
            model=self._service.known.to_text,
            lease_duration_s=settings.lease_duration_s,
            retry_period_s=settings.retry_period_s,
        )

    async def _lead(
        self,
        stages: WorkerDirectory,
        term: Term,
        *,
        hand_over: HandOver | None = None,
        workers: ReplicaStore | None = None,
    ) -> None:
        """Leads until this process gets a stop signal. Meanwhile the health service reports this
        scheduler as the leader, so that frontends find it. `workers`, if given, is the store in
        which the autoscaler sets the number of workers."""
        connect = tls.connector(self._settings.tls_dir, role=tls.WORKER)
        spares = SpareWatch(stages, on_unfit=self._note_unfit, connect=connect)
        autoscaler = None
        if workers is not None:
            autoscaler = build_autoscaler(
                self._settings,
                workers,
                n_stages=stages.n_stages,
                control=self._control,
                service=self._service,
                on_wanted=self._metrics.note_wanted,
            )
        leader = Leader(
            self._settings,
            stages,
            self._service,
            requests=self._requests,
            control=self._control,
            watching=self._watching,
            observe=[
                self._metrics.observe,
                self._progress.observe,
                self._pace.observe,
                spares.observe,
            ],
            traces=self._traces,
            connect=connect,
            build=self._build,
            hand_over=hand_over,
            on_shortfall=self._note_shortfall,
            on_wanted=self._metrics.note_wanted if autoscaler is None else lambda _: None,
            on_members=self._on_members,
            autoscaler=autoscaler,
        )
        announcing = asyncio.create_task(self._announce(leader))
        await self._health.set_serving(True)
        self._metrics.set_leading(True)
        self._watch_service.is_leading = True
        try:
            await leader.lead(term, self._stop)
        finally:
            announcing.cancel()
            self._metrics.set_leading(False)
            self._note_shortfall(Shortfall())
            await self._health.set_serving(False)
            self._service.resign("this scheduler no longer leads")
            self._watch_service.is_leading = False
            self._watching.end("this scheduler no longer leads")

    def _note_shortfall(self, shortfall: Shortfall) -> None:
        """Reports to operators and frontends why there is no pipeline and which workers do not
        fit."""
        self._note_unfit(shortfall.unfit)
        self._service.note_shortfall(shortfall.for_clients)

    def _note_unfit(self, unfit: tuple[UnfitWorker, ...]) -> None:
        self._metrics.note_unfit(unfit)
        self._watching.note_unfit(unfit)

    async def _announce(self, leader: Leader) -> None:
        """Waits until the first pipeline serves, and reports this to the parent process."""
        await leader.has_served.wait()
        self._pipe.report({"ready": True})

    def _trouble(self) -> str:
        """Returns why this scheduler cannot serve requests now, or an empty text if it can."""
        if self._service.is_open:
            return ""
        if self._service.is_asleep:
            return "the model is asleep"
        is_leader = self._elector is None or self._elector.is_leader
        return "no pipeline" if is_leader else "this scheduler has stood by"

    async def _tell_readiness(self) -> None:
        """Keeps the readiness of this process up to date. A leader is ready while it has a
        pipeline, or its model is asleep. A standby is ready while it could take over."""
        while True:
            elector = self._elector
            if elector is None or elector.is_leader:
                is_ready = self._service.is_open or self._service.is_asleep
            else:
                is_ready = elector.could_take_over
            await self._health.set_ready(is_ready)
            await asyncio.sleep(READINESS_PERIOD_S)

    def _recorded(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Returns a context manager in whose block events are recorded, if the settings ask for a
        recording."""
        if self._settings.record is None:
            return contextlib.nullcontext()
        return recorded(self._watching, self._settings.record)

    @contextlib.asynccontextmanager
    async def _listening(self, *, metrics_address: str | None) -> AsyncIterator[None]:
        """Serves frontends and probes inside the `with` block."""
        settings = self._settings
        await self._health.start()
        server = rpc.create_server()
        self._health.add_to(server)
        for service, servicer, table in (
            (SERVICE, self._service, CALLERS),
            (watch_service.SERVICE, self._watch_service, watch_service.CALLERS),
        ):
            callers = tls.callers(settings.tls_dir, table)
            handler = rpc_handlers.service_handler(service, servicer, callers=callers)
            server.add_generic_rpc_handlers((handler,))
        address = rpc.bind(server, settings.address, tls.server_credentials(settings.tls_dir))
        await server.start()
        self._port = parse(address).port
        probes = await self._health.listen(settings.health_address)
        await self._health.set_started()
        self._pipe.report({"address": address, "metrics": metrics_address})
        try:
            yield
        finally:
            await self._health.set_ready(False)
            self._health.end()
            await server.stop(grace=FLUSH_S)
            if probes is not None:
                await probes.stop(grace=0)


async def _acquire(elector: LeaderElector, watch: LeaderWatch) -> int:
    """Waits until this process leads, and watches the current leader meanwhile. Returns the
    term."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        term = await elector.acquire()
        watching.cancel()
    return term


async def _hold(elector: LeaderElector) -> None:
    """Renews the lease until cancelled. When this process has given the lease away, only waits,
    because the process still serves until another scheduler leads."""
    await elector.hold()
    await asyncio.Event().wait()


async def serve(settings: SchedulerSettings, traces: Tracing, build: BuildScheduler | None) -> int:
    """Serves until this process gets a stop signal. Returns the exit status 0."""
    await SchedulerProcess(settings, traces, build).run()
    return 0


def main(
    settings_class: type[SchedulerSettings] = SchedulerSettings,
    build: BuildScheduler | None = None,
) -> int:
    """Runs the scheduler's process and returns its exit status. Benchmarks pass a `build` that
    makes another scheduling core."""
    settings = settings_class.load("scheduler", sys.argv[1:])
    configure_logging("scheduler", settings.log_level, log_format=settings.log_format)
    if settings.ready_fd is not None:
        process.die_with_parent()
    process.wait_for_turn(settings.turn_fd, ready_fd=settings.ready_fd)
    try:
        with tracing.started(
            "orcinus-scheduler", decides=True, max_links=settings.max_batch_size
        ) as traces:
            return process.run(serve(settings, traces, build), ready_fd=settings.ready_fd)
    except (BrokenRule, Unavailable, LeadershipLost, OSError) as error:
        return give_up(error, ready_fd=settings.ready_fd, log_format=settings.log_format)


if __name__ == "__main__":
    sys.exit(main())
