"""How a machine is divided among the ranks that the launcher starts, and what services are told."""

import errno
import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.common.by_model import for_all
from services.common.model_task import ModelTask
from services.frontend.settings import FrontendSettings
from services.local.__main__ import announce, serve, shape_of
from services.local.launcher import Launcher, LocalAddresses, OnProgress
from services.local.service_options import share_cpus
from services.local.settings import LocalSettings
from services.scheduler.cluster.stages import StaticStages
from services.scheduler.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("options", "n_usable", "cpus", "expected"),
    [
        pytest.param(
            {}, 2, [0, 1], (2, [[0, 1]] * 2), id="a-spare-uses-the-cpus-of-the-only-worker"
        ),
        pytest.param({"stages": 2}, 2, [4, 6], (1, [[4], [6], []]), id="one-for-each-stage"),
        pytest.param(
            {"stages": 2, "tp": 2, "spares": 0},
            8,
            list(range(8)),
            (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
            id="even",
        ),
        pytest.param({"stages": 3}, 4, [0, 1, 2, 3], (1, [[]] * 4), id="some-left-over"),
        pytest.param({"stages": 3}, 2, [0, 1], (1, [[]] * 4), id="more-ranks-than-cpus"),
        pytest.param({"threads": 1}, 2, [0, 1], (1, [[]] * 2), id="fewer-wanted"),
        pytest.param({}, 2, [0, 1, 2, 3], (2, [[]] * 2), id="a-quota"),
        pytest.param(
            {"stages": 2, "pipelines": 2, "spares": 2},
            4,
            [0, 1, 2, 3],
            (1, [[0], [1], [2], [3], [], []]),
            id="several",
        ),
    ],
)
def test_threads_have_cpus_of_their_own_where_they_use_all(
    options: dict[str, Any], n_usable: int, cpus: list[int], expected: tuple[int, list[list[int]]]
) -> None:
    settings = LocalSettings(model=for_all(Path("model")), **options)
    assert share_cpus(settings, n_usable, cpus) == expected


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_frontend_listens_where_it_is_told_with_keys_and_certificates(host: str) -> None:
    settings = LocalSettings(
        model=for_all(Path("model")),
        host=host,
        http_port=81,
        grpc_port=0,
        api_keys_file=Path("keys.json"),
        tls_dir=Path("tls"),
    )
    options = Launcher(settings).frontend_options("127.0.0.1:5")
    assert (options["http-address"], options["grpc-address"]) == ("[::1]:81", "[::1]:0")
    assert (options["api-keys-file"], options["public-tls-dir"]) == (Path("keys.json"), Path("tls"))


async def test_there_is_a_page_unless_told_otherwise() -> None:
    for arguments, has_page in (((), True), (("--no-page",), False)):
        settings = LocalSettings.load("local", ["--model=model", *arguments])
        assert Launcher(settings).frontend_options("127.0.0.1:5")["page"] is has_page


@pytest.mark.parametrize("has_page", [True, False])
def test_the_address_of_the_page_is_printed_where_there_is_one(
    has_page: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = LocalSettings(model=for_all(Path("model")), page=has_page)
    announce(settings, LocalAddresses("127.0.0.1:81", "127.0.0.1:82", {"worker": "127.0.0.1:83"}))
    line = "See it at work: http://127.0.0.1:81/\n"
    assert capsys.readouterr().out.endswith(line) is has_page


@pytest.mark.parametrize(
    ("task", "route", "field"),
    [
        ("chat", "/v1/chat/completions", "messages"),
        ("text", "/v1/completions", "prompt"),
        ("vectors", "/v1/embeddings", "input"),
        ("scores", "/v1/rerank", "documents"),
    ],
)
def test_the_example_is_a_request_that_the_model_can_answer(
    task: ModelTask, route: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = LocalAddresses("127.0.0.1:81", "127.0.0.1:82", {}, task)
    announce(LocalSettings(model=for_all(Path("model"))), addresses)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Try: ")]
    _, _, url, *_, body = shlex.split(line)
    assert url == f"http://127.0.0.1:81{route}"
    assert field in json.loads(body)


async def test_further_settings_reach_their_service_and_win() -> None:
    arguments = ["--model=model", "--worker=n-threads=1", "--scheduler=max_requests=7"]
    arguments += ["--frontend=cors-origins=http://a:1,http://b:2", "--frontend=drain-s=0"]
    settings = LocalSettings.load("local", arguments)
    frontend = Launcher(settings).frontend_options("127.0.0.1:5")
    assert (frontend["cors-origins"], frontend["drain-s"]) == ("http://a:1,http://b:2", "0")
    assert Launcher(settings).scheduler_options([])["max-requests"] == "7"
    assert settings.worker == (("n-threads", "1"),)


@pytest.mark.parametrize("given", ["off", "/weights"])
async def test_workers_are_told_where_they_keep_weights(given: str) -> None:
    settings = LocalSettings.load("local", ["--model=model", f"--weight-cache={given}"])
    expected = None if given == "off" else Path(given)
    assert Launcher(settings).worker_options(0)["weight-cache"] == expected


async def test_the_workers_of_several_pipelines_have_no_stage_of_their_own() -> None:
    several = Launcher(LocalSettings(model=for_all(Path("model")), stages=2, pipelines=3))
    assert {several.worker_options(index)["stage-index"] for index in range(6)} == {None}
    options = several.scheduler_options(["a:1", "b:1", "c:1", "d:1", "e:1", "f:1"])
    given = [f"--{name}={options[name]}" for name in ("stages", "n-stages")]
    settings = SchedulerSettings.load("scheduler", given)
    directory = StaticStages(settings.stage_addresses, settings.n_stages)
    assert (len(directory.addresses()), directory.n_stages) == (6, 2)
    one = Launcher(LocalSettings(model=for_all(Path("model")), stages=2, spares=0))
    assert [one.worker_options(index)["stage-index"] for index in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 1),
        (["--spares=2"], 2),
        (["--spares=0"], 0),
        (["--fail-fast"], 0),
        (["--worker=device=cuda"], 0),
        (["--worker=device=cuda", "--spares=1"], 1),
    ],
)
async def test_spares_get_no_stage_and_do_not_make_another_pipeline(
    arguments: list[str], expected: int
) -> None:
    settings = LocalSettings.load("local", ["--model=model", "--stages=2", *arguments])
    assert settings.n_workers == 2 + expected
    assert [settings.is_spare(it) for it in range(settings.n_workers)].count(True) == expected
    launcher = Launcher(settings)
    stages = [launcher.worker_options(it)["stage-index"] for it in range(settings.n_workers)]
    assert stages == ([None] * (2 + expected) if expected else [0, 1])
    assert launcher.scheduler_options([])["max-pipelines"] == 1


def test_the_numbers_of_pipelines_and_stages_are_printed() -> None:
    shapes = {
        "2 pipelines of 1 stage": (2, 1),
        "2 stages": (1, 2),
        "3 pipelines of 2 stages": (3, 2),
    }
    for text, (pipelines, stages) in shapes.items():
        settings = LocalSettings(model=for_all(Path("model")), pipelines=pipelines, stages=stages)
        assert shape_of(settings) == text


@pytest.mark.parametrize("option", ["drain-s", "=5", "drain-s,hold-s=3"])
def test_a_further_setting_without_name_or_value_is_refused(option: str) -> None:
    with pytest.raises(SystemExit, match=r"^error: frontend: must be NAME=VALUE"):
        LocalSettings.load("local", ["--model=model", f"--frontend={option}"])


async def test_each_of_several_models_has_workers_of_its_own() -> None:
    arguments = ["--model=a=/a", "--model=b=/b", "--stages=2", "--spares=0"]
    settings = LocalSettings.load("local", arguments)
    launcher = Launcher(settings)
    options = [launcher.worker_options(index) for index in range(settings.n_workers)]
    assert [(str(each["model"]), each["stage-index"]) for each in options] == [
        *(("/a", 0), ("/a", 1)),
        *(("/b", 0), ("/b", 1)),
    ]
    assert share_cpus(settings, 4, [0, 1, 2, 3]) == (1, [[0], [1], [2], [3]])
    assert shape_of(settings) == "2 stages each"


async def test_each_of_several_models_pools_in_its_own_way() -> None:
    arguments = ["--model=a=/a", "--model=b=/b", "--model=c=/c", "--spares=0"]
    for pooling, expected in (
        ("b=yes-no", [None, "yes-no", None]),
        ("mean,b=cls", ["mean", "cls", "mean"]),
    ):
        settings = LocalSettings.load("local", [*arguments, f"--pooling={pooling}"])
        launcher = Launcher(settings)
        assert [launcher.worker_options(index)["pooling"] for index in range(3)] == expected


async def test_the_frontend_is_told_the_scheduler_of_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for models, addresses in (
        (["a=/a", "b=./b"], ["127.0.0.1:5", "127.0.0.1:6"]),
        (["./odd=name"], ["127.0.0.1:5"]),
    ):
        settings = LocalSettings.load("local", [f"--model={model}" for model in models])
        options = Launcher(settings).frontend_options(*addresses)
        given = [f"--{name}={options[name]}" for name in ("model", "scheduler")]
        told = FrontendSettings.load("frontend", given).models
        assert [model.scheduler for model in told] == addresses
        assert [model.path for model in told] == [path.absolute() for _, path in settings.model]
        assert [model.names for model in told] == [
            (name,) if name else () for name, _ in settings.model
        ]


def test_the_example_for_several_models_names_one(capsys: pytest.CaptureFixture[str]) -> None:
    settings = LocalSettings.load("local", ["--model=a=/a", "--model=b=/b"])
    addresses = LocalAddresses("127.0.0.1:81", "127.0.0.1:82", {})
    announce(settings, addresses)
    out = capsys.readouterr().out
    assert out.startswith("Orcinus serves a and b on 1 stage each: OpenAI http://127.0.0.1:81/v1")
    [line] = [line for line in out.splitlines() if line.startswith("Try: ")]
    assert json.loads(shlex.split(line)[-1])["model"] == "a"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model=a=/a", "--model=/b"], "model: several models need a name each"),
        (["--model=a=/a", "--served-model-name=x"], "served_model_name: not together"),
        (["--model=a=/a", "--pooling=b=mean"], "pooling: `model` has no model named b"),
    ],
)
def test_models_without_a_name_each_are_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: {reason}"):
        LocalSettings.load("local", arguments)


async def test_a_spare_that_cannot_start_ends_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher(LocalSettings.load("local", ["--model=/a", "--spares=1"]))
    launcher._has_started = True
    launcher._lose_worker(0, "worker 1 hung after 5 restarts")
    assert not launcher.death.done()
    assert "worker 1 hung after 5 restarts; there is one spare less" in capsys.readouterr().err
    launcher._lose_worker(0, "worker 0 hung after 5 restarts")
    assert launcher.death.result() == "worker 0 hung after 5 restarts"


async def test_a_model_that_is_lost_for_good_ends_the_others_only_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for fail_fast in (False, True):
        arguments = ["--model=a=/a,b=/b", *(["--fail-fast"] if fail_fast else [])]
        settings = LocalSettings.load("local", arguments)
        launcher = Launcher(settings)
        launcher._has_started = True
        launcher._lose_model(1, "b: stage 0 hung")
        assert launcher.death.done() is fail_fast
        launcher._lose_model(0, "a: stage 0 hung")
        assert launcher.death.done()
    assert "b: stage 0 hung; b is not served any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "n_usable", "expected"),
    [
        ([], 2, 1),
        ([], 3, 2),
        (["--fail-fast"], 3, 1),
        (["--frontends=1"], 3, 1),
        (["--frontends=3"], 2, 3),
    ],
)
async def test_frontends_share_their_ports_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], n_usable: int, expected: int
) -> None:
    monkeypatch.setattr("services.local.settings.usable_cpus", lambda: n_usable)
    settings = LocalSettings.load("local", ["--model=model", *arguments])
    assert settings.n_frontends == expected
    shares = Launcher(settings).frontend_options("127.0.0.1:5")["share-ports"]
    assert shares is (True if expected > 1 else None)


async def test_only_the_loss_of_all_frontends_ends_a_system(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher = Launcher(LocalSettings.load("local", ["--model=/a", "--frontends=2"]))
    launcher._has_started = True
    launcher._lose_frontend("frontend 2 hung after 5 restarts")
    assert not launcher.death.done()
    assert "after 5 restarts; there is one frontend less" in capsys.readouterr().err
    launcher._lose_frontend("frontend hung after 5 restarts")
    assert launcher.death.result() == "frontend hung after 5 restarts"


@pytest.mark.parametrize("option", ["--spares=1", "--frontends=2"])
async def test_the_first_loss_ends_all_services_if_asked(option: str) -> None:
    settings = LocalSettings.load("local", ["--model=/a", "--fail-fast", option])
    launcher = Launcher(settings)
    launcher._has_started = True
    lose = (
        launcher._lose_frontend if settings.n_frontends > 1 else partial(launcher._lose_worker, 0)
    )
    lose("it was killed by SIGKILL")
    assert launcher.death.done()
    assert launcher.death.result() == "it was killed by SIGKILL"


class NoPipes(Launcher):
    """A launcher that cannot start a process."""

    async def start(self, on_progress: OnProgress) -> LocalAddresses:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_service_that_cannot_be_started_ends_the_command_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await serve(LocalSettings.load("local", ["--model=/a"]), NoPipes) == 1
    said = capsys.readouterr().err
    assert said == "error: a service cannot be started: [Errno 24] Too many open files\n"
