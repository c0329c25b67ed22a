"""Sites serve all requests, and the command writes its record and figure."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.placement import __main__ as command
from benchmarks.placement.fleet import Fleet
from benchmarks.placement.hardware import COSTS
from benchmarks.placement.routers import LeastRequests, RoundRobin
from benchmarks.placement.trials import HALVES, SITES, Trial
from simulator.engine import Simulation
from simulator.virtual_clock import VirtualClock


@pytest.mark.parametrize("site", [*SITES, HALVES])
def test_each_site_serves_all_requests(site: str) -> None:
    trial = Trial("chats", site, n_pipelines=4, n_requests=40, is_overload=True)
    load, clock = trial.requests(), VirtualClock()
    fleet = trial.fleet(load.block_size, clock)
    outcome = Simulation(fleet, COSTS, load.arrivals, clock=clock).run()
    assert len(outcome.requests) == 40
    assert len(outcome.busy) == 4
    assert all(busy > 0 for busy in outcome.busy)
    assert fleet.hit_rate > 0


def test_one_pool_shares_a_queue_and_a_router_does_not() -> None:
    """Four long requests and four short ones arrive in turns. In turn, all long ones go to the
    same two pipelines; one pool gives a request to a pipeline that is free."""
    trial = Trial("azure", "", 2, n_requests=40, is_overload=False)
    arrivals = trial.requests().arrivals
    ends_s = []
    for n_groups, n_each in ((1, 2), (2, 1)):
        clock = VirtualClock()
        fleet = Fleet(n_groups, n_each, RoundRobin(), clock=clock, block_size=64)
        outcome = Simulation(fleet, COSTS, arrivals, clock=clock).run()
        ends_s.append(sum(one.ttft_s for one in outcome.requests))
    assert ends_s[0] < ends_s[1]


def test_groups_of_several_pipelines_take_turns() -> None:
    clock = VirtualClock()
    fleet = Fleet(2, 2, LeastRequests(), clock=clock, block_size=64)
    for index in range(4):
        arrival = Trial("azure", "", 4, n_requests=4, is_overload=False).requests().arrivals[index]
        fleet.submit(arrival.request(index))
    assert [group.n_requests for group in fleet.groups] == [2, 2]
    assert len(fleet.schedulers) == 4


@pytest.mark.thorough
def test_the_command_writes_what_it_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figure = tmp_path / "placement.json", tmp_path / "placement.png"
    arguments = ["--loads", "chats", "--pipelines", "1", "2", "--requests", "20"]
    monkeypatch.setattr(
        sys, "argv", ["placement", *arguments, f"--out={out}", f"--figure={figure}"]
    )
    command.main()
    runs = json.loads(out.read_text())["runs"]
    assert {(one["site"], one["n_pipelines"], one["is_overload"]) for one in runs} == {
        (site, n, is_overload) for site in SITES for n in (1, 2) for is_overload in (False, True)
    }
    assert figure.stat().st_size > 0
    assert "one pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--loads", "mooncake"], "--mooncake"), (["--pipelines", "0"], "--pipelines")],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert message in capsys.readouterr().err
