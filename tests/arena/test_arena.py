"""The arena compares policies on equal requests, and stops one that breaks a rule."""

import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.arena.__main__ import main
from services.arena.entrants import GALLERY, Entrant, parse
from services.arena.figures import Figures
from services.arena.real import Place
from services.arena.referee import RefereedScheduler, Stopped
from services.arena.scheduler import REPORT, ReportingScheduler
from services.arena.setup import Setup
from services.arena.traffic import Choice, traffic_of
from services.arena.virtual import NoisyPredictor, capacity, run, scaled
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.registry import POLICIES
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.settings import SchedulerSettings
from simulator.engine import Arrival
from simulator.machines import MACHINES, MachineCosts
from tests.scheduler.core.workload import Arrival as CoreArrival
from tests.scheduler.core.workload import Driver

SETUP = Setup(MachineCosts(MACHINES["processor"]), 4000, max_batch_size=8, max_batch_tokens=64)

HOG = """
from services.scheduler.core.policies import Policy, Selection


class Hog(Policy):
    name = "hog"
    api = 1

    def select(self, pool, kv_manager):
        chosen = []
        for request in pool.candidates():
            if BREAK:
                break
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            chosen.append(Selection(request, request.n_unscheduled, reservation))
        return chosen
"""


def arrivals(n: int = 24) -> list[Arrival]:
    return [Arrival(0.05 * i, 20 + 7 * (i % 5), 3 + 5 * (i % 3), 16) for i in range(n)]


def written(folder: Path, text: str) -> Path:
    path = folder / "hog.py"
    path.write_text(text)
    return path


def results(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", GALLERY)
def test_every_entrant_of_the_gallery_serves_all_requests_and_keeps_the_rules(name: str) -> None:
    found = run(Entrant.of(name), SETUP, arrivals())
    assert found.n_requests == 24
    assert found.tokens_per_s > 0
    assert found.ttft_p50_s <= found.ttft_p99_s
    assert found.select_us is not None


def test_virtual_time_does_not_depend_on_the_machine_that_computes_it() -> None:
    one, two = (run(Entrant.of("aging"), SETUP, arrivals()) for _ in range(2))
    for name in Figures.__dataclass_fields__.keys() - {"select_us"}:
        assert getattr(one, name) == getattr(two, name)


def test_stages_and_pipelines_raise_throughput() -> None:
    many = [Arrival(0.0, 30, 10)] * 48
    alone = run(Entrant.of("chunked"), SETUP, many).tokens_per_s
    stages = Setup(MachineCosts(MACHINES["processor"], n_stages=2), 4000, 8, 64)
    assert run(Entrant.of("chunked"), stages, many).tokens_per_s > 1.5 * alone
    pipelines = Setup(SETUP.costs, 4000, 8, 64, n_pipelines=2)
    assert run(Entrant.of("chunked"), pipelines, many).tokens_per_s > 1.5 * alone


def test_optimistic_admission_is_counted_as_preemptions() -> None:
    setup = Setup(SETUP.costs, 192, 8, 64, is_optimistic=True)
    requests = [Arrival(0.0, 8, 4, 64)] * 12 + [Arrival(1.0 + i, 8, 60, 64) for i in range(12)]
    requests += [Arrival(20.0, 8, 60, 64)] * 8
    found = run(Entrant.of("chunked"), setup, requests)
    assert found.n_preemptions
    assert found.n_requests == 32


def test_the_rate_is_a_part_of_what_chunked_serves_at_once() -> None:
    rate = 0.5 * capacity(SETUP, arrivals())
    slow = scaled(arrivals(), rate=rate)
    assert (len(slow) - 1) / slow[-1].time_s == pytest.approx(rate)
    assert scaled(arrivals(1), rate=rate) == arrivals(1)


def test_fairness_is_measured_where_several_clients_got_something() -> None:
    one, two = (AccountUse(AccountLimits(), name=name) for name in ("one", "two"))
    apart = [Arrival(9.0 * i, 4, 2, account=(one, two)[i % 2]) for i in range(4)]
    assert run(Entrant.of("chunked"), SETUP, apart).jain == pytest.approx(1.0)
    at_once = [replace(each, time_s=0.0) for each in apart]
    assert run(Entrant.of("chunked"), SETUP, at_once).jain is None
    alone = [replace(each, account=one) for each in apart]
    assert run(Entrant.of("chunked"), SETUP, alone).jain is None


def test_exact_predictions_help_the_shortest_first() -> None:
    burst = [Arrival(0.0, 4, 40 if i % 2 else 2, 64) for i in range(40)]
    lengths = {str(index): one.n_output for index, one in enumerate(burst)}
    exact = NoisyPredictor(lengths, error=0.0, seed=0)
    known = run(Entrant.of("shortest"), SETUP, burst, predictor=exact)
    blind = run(Entrant.of("orca"), SETUP, burst)
    assert known.ttft_p50_s < blind.ttft_p50_s
    noisy = NoisyPredictor(lengths, error=1.0, seed=0)
    request = Request(RequestId("1"), [1], 64)
    assert exact.n_left(request) == 40
    assert noisy.n_left(request) != 40


def test_a_policy_that_overbooks_a_batch_is_stopped_with_its_name_the_batch_and_the_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, HOG.replace("BREAK", "False"))
    options = ("--requests=20", "--machine=processor", "--json", "--max-batch-size=2", "--load=9")
    assert main(["orca", str(path), *options]) == 1
    orca, hog = results(capsys)
    assert orca["n_requests"] == 20
    assert hog["policy"] == "hog"
    rule = r"batch \d+: policy hog: \d requests are selected, and max_batch_size is 2"
    assert re.fullmatch(rule, hog["stopped"])


def test_a_policy_that_starves_requests_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, HOG.replace("BREAK", "request.arrival == 3"))
    assert main([str(path), "--requests=8", "--machine=processor", "--max-batch-size=9"]) == 1
    assert "hog                        virtual   stopped: after batch" in capsys.readouterr().out
    with pytest.raises(
        Stopped, match=r"every request must end: 5 never run, the first is request 3"
    ):
        run(Entrant.of("hog"), SETUP, arrivals(8))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("request.nothing", r"AttributeError: .*nothing.* \(hog\.py, line \d+\)"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(hog\.py, line \d+\)"),
        ("exit(0)", "SystemExit"),
    ],
)
def test_a_policy_that_raises_is_stopped_and_its_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, error: str
) -> None:
    path = written(tmp_path, HOG.replace("BREAK", code))
    assert main([str(path), "--requests=8", "--machine=processor", "--json"]) == 1
    [found] = results(capsys)
    assert re.match(f"batch 1: policy hog: raises {error}", found["stopped"])


def test_a_real_system_has_the_memory_and_the_admission_that_are_asked_for() -> None:
    place = Place(Path("model"), None, 1, 8, 64, n_slots=192, is_optimistic=True)
    settings = place.settings(Entrant.of("chunked"))
    given = [f"--{name}={value}" for name, value in settings.scheduler]
    told = SchedulerSettings.load("scheduler", ["--stages=a:1", *given])
    assert (told.n_slots, told.admission, told.policy) == (192, "optimistic", "chunked")
    usual = dict(Place(Path("model"), None, 1, 8, 64).settings(Entrant.of("chunked")).scheduler)
    assert usual["admission"] == "reserve"
    assert "n-slots" not in usual


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nothing_at_all", "cannot be loaded: ModuleNotFoundError"),
        ("A = 1", "must define one policy or order, and defines none"),
        (HOG.replace('name = "hog"', ""), "has no name"),
        (HOG.replace("api = 1", ""), "must have `api = 1`"),
        (HOG.replace("api = 1", "api = 2"), "is written for version 2 of the contract"),
        (HOG + "\n    x y\n", "cannot be loaded: SyntaxError: invalid syntax (hog.py, line"),
        (HOG.replace('"hog"', '"orca"'), "the policy 'orca' is one of this project"),
        (HOG.replace("def select", "def choose"), "lacks select"),
        (HOG.replace('"hog"', '""'), "has no name"),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit"),
        (HOG + "\n    def __init__(self, options):\n        raise KeyError\n", "cannot be made"),
        (HOG + "\n    def __init__(self, options):\n        pass\n", "cannot be made"),
    ],
)
def test_a_file_that_breaks_the_contract_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(written(tmp_path, text)), "--requests=2"]) == 2
    assert why in capsys.readouterr().err


def test_two_files_with_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert main([str(written(one, HOG)), str(written(other, HOG)), "--requests=2"]) == 2
    assert "define 'hog'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument",
    ["--prediction-error=-1", "--prediction-error=nan", "--prediction-error=99", "--figure=a.foo"],
)
def test_an_option_with_a_wrong_value_is_refused(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--requests=2", argument])
    assert "must " in capsys.readouterr().err


def test_entrants_are_policies_orders_or_both() -> None:
    texts = ["orca", "fair", "orca/fair", "chunked/fcfs", "chunked"]
    entrants, files = parse(texts)
    assert [one.name for one in entrants] == ["orca", "fair", "orca/fair", "chunked"]
    assert not files
    for wrong in ("unheard-of", "orca/unheard-of", "unheard-of/fair"):
        with pytest.raises(ValueError, match="there is no"):
            parse([wrong])
    for text, file in (
        ("no.py", "no.py"),
        ("/nowhere/no.py", "/nowhere/no.py"),
        ("nowhere/no.py", "nowhere/no.py"),
        ("orca/no.py", "no.py"),
        ("orca//nowhere/no.py", "/nowhere/no.py"),
    ):
        with pytest.raises(ValueError, match=f"^{Path(file).resolve()} does not exist"):
            parse([text])


def test_an_order_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "last.py"
    path.write_text(
        "from services.scheduler.core.order.by_key import OrderByKey\n"
        "class Last(OrderByKey):\n"
        "    name = 'last'\n"
        "    api = 1\n"
        "    def key(self, request):\n"
        "        return -request.arrival\n"
    )
    entrants, files = parse([str(path), f"orca/{path}"])
    assert [one.name for one in entrants] == ["last", "orca/last"]
    assert files == [path]
    assert run(entrants[1], SETUP, arrivals()).n_requests == 24


def test_files_of_all_three_traces_are_read(tmp_path: Path) -> None:
    azure, burst, mooncake = (tmp_path / name for name in ("a.csv", "b.csv", "m.jsonl"))
    with azure.open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
                ("2023-11-16 18:15:46", 30, 4),
                ("2023-11-16 18:15:48", 5000, 4),
                ("2023-11-16 18:15:49", 20, 9),
            ]
        )
    burst.write_text("Timestamp,Request tokens,Response tokens\n5,30,4\n8,20,9\n")
    lines = [
        {"timestamp": 1000 * t, "input_length": n, "output_length": out, "hash_ids": [1]}
        for t, n, out in ((0, 30, 4), (3, 20, 9))
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    for path in (azure, burst, mooncake):
        found = traffic_of(str(path), Choice(9, max_tokens=100))
        assert [(one.time_s, one.n_prompt, one.n_output) for one in found.arrivals] == [
            (0.0, 30, 4),
            (3.0, 20, 9),
        ]
        assert [one.max_new_tokens for one in found.arrivals] == [4, 16]
        assert found.name == path.stem
    small = traffic_of(str(azure), Choice(9, max_tokens=34)).arrivals
    assert [one.max_new_tokens for one in small] == [4, 14]
    with pytest.raises(ValueError, match="no request has at most 10 tokens"):
        traffic_of(str(azure), Choice(9, max_tokens=10))
    with pytest.raises(ValueError, match="is no file, and none of paper, azure-code"):
        traffic_of("unheard-of", Choice(9, max_tokens=10))


def test_one_client_sends_half_of_all_requests() -> None:
    found = traffic_of("azure-conversation", Choice(400, max_tokens=9000, n_clients=5))
    names = [one.account.name for one in found.arrivals if one.account is not None]
    assert 0.4 < names.count("client 0") / 400 < 0.6
    assert len(set(names)) == 5


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("unheard-of",), "there is no policy 'unheard-of'; known are chunked, orca"),
        (("--trace", "unheard-of"), "is no file"),
        (("--recording", "/unheard-of"), "No such file"),
        (("orca", "--max-batch-size=600"), "max_batch_tokens: 512 is less than"),
    ],
)
def test_what_cannot_be_run_is_said(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--requests=2", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_the_table_has_a_line_for_each_policy_and_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["orca", "fair", "--requests=6", "--trace", "paper", "azure-code"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line] == [
        ["trace", "paper"],
        ["policy", "way"],
        ["p50", "p99"],
        ["orca", "virtual"],
        ["fair", "virtual"],
        ["trace", "azure-code"],
        ["policy", "way"],
        ["p50", "p99"],
        ["orca", "virtual"],
        ["fair", "virtual"],
    ]


@pytest.mark.thorough
def test_the_figure_is_a_picture(tmp_path: Path) -> None:
    figure = tmp_path / "arena.png"
    assert main(["orca", "fair", "--requests=4", f"--figure={figure}"]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_its_library_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "services.arena.drawing", raising=False)
    for name in [one for one in sys.modules if one.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([f"--figure={tmp_path / 'a.png'}"]) == 2
    assert "figure: needs the package matplotlib" in capsys.readouterr().err


def refereed(kind: type[RefereedScheduler] = RefereedScheduler) -> Driver:
    scheduler = kind(
        RequestPool(max_requests=100),
        KVManager(n_blocks=40, block_size=1, expected_use=ExpectedUse()),
        policy=ChunkedPolicy(max_batch_size=4, max_batch_tokens=8),
        pipeline_depth=2,
        token_hand_off=True,
    )
    driver = Driver(scheduler, [CoreArrival(0, 3, 4, 4)] * 3)
    driver.arrive()
    return driver


def test_the_referee_notices_a_span_at_the_wrong_place() -> None:
    driver = refereed()
    assert driver.select() is not None
    driver.return_oldest()
    driver.requests[1].n_scheduled -= 1
    with pytest.raises(Stopped, match=r"request 1 goes on at token 2, and its last span ended at"):
        driver.select()


def test_the_referee_notices_a_block_with_two_owners() -> None:
    driver = refereed()
    scheduler = driver.scheduler
    assert driver.select() is not None
    first = driver.requests[0].reservation
    assert first is not None
    taken, allocate = list(first.block_ids), scheduler.kv_manager.allocate
    scheduler.kv_manager.allocate = (  # type: ignore[method-assign]
        lambda *given, **options: allocate(*given, **options) and [taken[0]]
    )
    driver.return_oldest()
    with pytest.raises(Stopped, match=r"block .* of request 0 is given to request 1"):
        driver.select()


def test_the_referee_notices_a_token_that_is_returned_twice() -> None:
    driver = refereed()
    batch = driver.select()
    assert batch is not None
    assert driver.select() is not None
    updates = driver.scheduler.apply(batch.iteration, [1] * batch.n_sampled)
    assert isinstance(driver.scheduler, RefereedScheduler)
    with pytest.raises(Stopped, match=r"batch 1: policy chunked: request 0: token 1 follows token"):
        driver.scheduler._withhold(updates)


def apply_one(scheduler: RefereedScheduler) -> None:
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, [1] * batch.n_sampled)


def cancel_one(scheduler: RefereedScheduler) -> None:
    scheduler.cancel(next(iter(scheduler.pool)))


@pytest.mark.parametrize("end", [apply_one, cancel_one])
def test_the_report_has_the_rule_that_an_answer_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[RefereedScheduler], None]
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setenv(REPORT, str(report))
    driver = refereed(ReportingScheduler)
    assert isinstance(driver.scheduler, RefereedScheduler)
    driver.scheduler._n_told[driver.requests[0]] = -1  # as if the request had ended
    with pytest.raises(Stopped, match="request 0 has ended twice") as stopped:
        end(driver.scheduler)
    assert json.loads(report.read_text()) == {"stopped": str(stopped.value)}


def test_the_referee_notices_memory_that_stays_reserved() -> None:
    driver = refereed()
    while not driver.is_done:
        driver.arrive()
        if driver.select() is None or len(driver.in_flight) > 1:
            driver.return_oldest()
    while driver.in_flight:
        driver.return_oldest()
    assert isinstance(driver.scheduler, RefereedScheduler)
    driver.scheduler.check_over()
    driver.scheduler.kv_manager.n_reserved_blocks += 2
    with pytest.raises(Stopped, match="2 blocks stay reserved"):
        driver.scheduler.check_over()


def test_all_policies_of_this_project_are_in_the_gallery() -> None:
    assert set(POLICIES) | {"fair"} == set(GALLERY)
