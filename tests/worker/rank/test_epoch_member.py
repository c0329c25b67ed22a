"""A rank that runs ahead of its device: what it launches when, and what it says of it. The device
is a clock whose marks pass when the test says so."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from orcinus.v1 import worker_pb2

from kernels.forms.logits import Logits
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.plan import IterationPlan
from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank.device_clock import DeviceClock, HostClock
from services.worker.rank.epoch_adapters import EpochAdapters
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.reported_tokens import ReportedTokens


@dataclass
class SlowDevice:
    """Marks are numbers that pass in order; from one to the next a microsecond has passed."""

    n_marks: int = 0
    n_passed: int = 0

    def mark(self) -> int:
        self.n_marks += 1
        return self.n_marks

    def has_passed(self, mark: int) -> bool:
        return mark <= self.n_passed

    def elapsed_ns(self, start: int, end: int) -> int:
        assert end <= self.n_passed
        return (end - start) * 1000

    def catch_up(self) -> None:
        self.n_passed = self.n_marks


@dataclass
class Runner:
    """Writes down what it is asked for; every token is the same."""

    done: list[str] = field(default_factory=list)
    token: int = 7

    def prepare(self, plan: IterationPlan) -> int:
        self.done.append(f"prepare {plan.iteration}")
        return plan.iteration

    def empty_hidden(self, n_tokens: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(n_tokens), 4)

    def forward(self, batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        self.done.append(f"forward {batch}")
        return torch.zeros(1, 4)

    def logits(self, batch: int, hidden: torch.Tensor | None) -> Logits:
        return Logits(self.forward(batch, hidden))

    def sample(self, batch: int, logits: Logits) -> torch.Tensor:
        self.done.append(f"sample {batch}")
        return torch.tensor([self.token])

    def cut(self, batch: int) -> list[int]:
        return [0] if batch == 2 else []

    def logprobs(self, batch: int, logits: Logits, tokens: Numbers) -> None:
        return None

    def vectors(self, batch: int, logits: Logits) -> None:
        """Returns None: no request wants a vector."""

    def close(self) -> None:
        self.done.append("let go")


@dataclass
class Peers:
    """Neighbours that write down what they are asked for."""

    done: list[str]

    @property
    def tensor_parallel(self) -> TensorParallel:
        return SINGLE

    def warm_up(self) -> None:
        pass

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> "Receipt":
        self.done.append(f"start receive {iteration}")
        return Receipt(self.done, iteration)

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        self.done.append(f"send {iteration}")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.done.append("close")


@dataclass
class Receipt:
    done: list[str]
    iteration: int

    def wait(self) -> None:
        self.done.append(f"receive {self.iteration}")


def member_of(
    runner: Runner,
    clock: DeviceClock | None,
    *,
    stage_index: int = 0,
    n_stages: int = 1,
    adapters: EpochAdapters | None = None,
) -> EpochMember:
    request = worker_pb2.JoinPipelineRequest(
        pipeline_id="p", epoch=1, stage_index=stage_index, members=["x"] * n_stages
    )
    return EpochMember(request, runner, Peers(runner.done), clock, adapters=adapters)


def plan(iteration: int, *, is_traced: bool = False) -> worker_pb2.RunIterationsRequest:
    message = worker_pb2.RunIterationsRequest(
        pipeline_id="p", epoch=1, iteration=iteration, row=[0], n_tokens=[1], sample=[True]
    )
    if is_traced:
        message.trace.SetInParent()
    return message


def test_a_rank_launches_what_is_announced_before_its_device_has_finished() -> None:
    runner, device = Runner(), SlowDevice()
    member = member_of(runner, device)
    for iteration in (1, 2):
        member.announce(plan(iteration))
        member.start_next()
    assert runner.done == [
        f"{what} {i}" for i in (1, 2) for what in ("prepare", "forward", "sample")
    ]
    assert (member.n_announced, member.n_started) == (0, 2)
    assert member.take_finished() == []
    device.catch_up()
    finished = member.take_finished()
    assert [each.timing.iteration for each in finished] == [1, 2]
    assert [each.tokens for each in finished] == [ReportedTokens([7])] * 2
    assert member.n_started == 0


def test_iterations_finish_in_their_order_and_one_by_one() -> None:
    device = SlowDevice()
    member = member_of(Runner(), device)
    member.announce(plan(1))
    member.start_next()
    n_of_first = device.n_marks
    member.announce(plan(2))
    member.start_next()
    device.n_passed = n_of_first
    assert [each.timing.iteration for each in member.take_finished()] == [1]
    device.catch_up()
    assert [each.timing.iteration for each in member.take_finished()] == [2]


def test_a_plan_is_prepared_and_launched_although_its_activations_have_not_come() -> None:
    runner = Runner()
    member = member_of(runner, SlowDevice(), stage_index=1, n_stages=3)
    member.announce(plan(1))
    member.announce(plan(2))
    member.start_next()
    member.start_next()
    assert runner.done == [
        *("start receive 1", "start receive 2"),
        *(f"{what} {i}" for i in (1, 2) for what in ("prepare", "receive", "forward", "send")),
    ]


def test_times_are_those_of_the_device_and_preparing_counts_where_it_waits_for_that() -> None:
    device = SlowDevice()
    member = member_of(Runner(), device, stage_index=1, n_stages=2)
    for iteration in (1, 2):
        member.announce(plan(iteration, is_traced=True))
        member.start_next()
    device.catch_up()
    first, second = member.take_finished()
    assert (first.timing.receive_ns, second.timing.receive_ns) == (1000, 1000)
    assert first.timing.compute_ns > 1000, "the device had nothing else to do"
    assert second.timing.compute_ns == 1000
    assert second.trace is not None
    assert second.trace.timing == second.timing


def test_a_rank_without_a_device_has_finished_what_it_has_started() -> None:
    member = member_of(Runner(), None)
    for iteration in (1, 2):
        member.announce(plan(iteration))
        member.start_next()
        [finished] = member.take_finished()
        assert finished.tokens is not None
        assert (finished.timing.iteration, finished.tokens.token_ids) == (iteration, [7])
        assert finished.cut == ([0] if iteration == 2 else [])
        assert finished.timing.compute_ns > 0
        assert finished.trace is None


@pytest.mark.parametrize("has_device", [False, True])
def test_an_iteration_has_ended_when_it_did_and_not_when_somebody_looks(has_device: bool) -> None:
    device = SlowDevice() if has_device else None
    member = member_of(Runner(), device)
    member.announce(plan(1, is_traced=True))
    member.start_next()
    started_ns = time.time_ns()
    time.sleep(0.01)
    if device is not None:
        device.catch_up()
    [finished] = member.take_finished()
    assert finished.trace is not None
    timing = finished.timing
    spent_ns = timing.receive_ns + timing.compute_ns + timing.send_ns
    ended_ns = finished.trace.start_unix_ns + spent_ns
    assert (ended_ns > started_ns) == has_device  # only a device is still at work then


def test_what_is_not_finite_is_told_when_it_is_known() -> None:
    device = SlowDevice()
    member = member_of(Runner(token=-1), device)
    member.announce(plan(1))
    member.start_next()
    assert member.take_finished() == []
    device.catch_up()
    [finished] = member.take_finished()
    assert finished.tokens is not None
    assert (finished.tokens.token_ids, finished.tokens.broken) == ([0], [0])


def test_leaving_drops_what_is_under_way() -> None:
    runner = Runner()
    member = member_of(runner, SlowDevice())
    member.announce(plan(1))
    member.start_next()
    member.announce(plan(2))
    member.close()
    assert (member.n_announced, member.n_started) == (0, 0)
    assert runner.done[-2:] == ["let go", "close"], "NCCL waits for who holds its groups"


def test_host_clocks_tell_the_time() -> None:
    clock = HostClock()
    start = clock.mark()
    end = clock.mark()
    assert clock.has_passed(end)
    assert clock.elapsed_ns(start, end) == end - start >= 0
