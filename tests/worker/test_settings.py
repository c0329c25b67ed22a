"""Which stage a worker is by its settings, and what it tells its ranks."""

from pathlib import Path

import pytest

from services.worker.settings import PipelinePlace, RankSettings, SharedSettings, WorkerSettings


def place(*arguments: str) -> PipelinePlace | None:
    return WorkerSettings.load("worker", ["--model=/models/demo", *arguments]).place


def test_the_place_is_what_is_given() -> None:
    assert place("--n-stages=3", "--stage-index=1") == PipelinePlace(1, 3)


def test_without_an_index_the_place_is_assigned() -> None:
    assert place("--n-stages=3") is None


def test_an_empty_index_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCINUS_STAGE_INDEX", "")  # from a label that the pod does not have
    assert place("--n-stages=2") is None


def test_a_place_beyond_the_last_stage_is_refused() -> None:
    with pytest.raises(SystemExit, match="stage 3 is not one of 3"):
        place("--n-stages=3", "--stage-index=3")


def test_the_model_is_called_as_the_operator_calls_it(tmp_path: Path) -> None:
    (tmp_path / "0a1b2c").mkdir()
    (tmp_path / "mine").symlink_to("0a1b2c")
    for given in (tmp_path / "mine", tmp_path / "mine" / ".", tmp_path / "x" / ".." / "mine"):
        settings = WorkerSettings.load("worker", [f"--model={given}"])
        assert settings.for_rank(0).at(PipelinePlace(0, 1)).served_model_name == "mine"


def kv_memory(*arguments: str) -> int | None:
    settings = WorkerSettings.load("worker", ["--model=/models/demo", *arguments])
    return settings.for_rank(0).at(PipelinePlace(0, 1)).kv_memory_bytes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 2**30),
        (["--kv-memory=512MiB"], 2**29),
        (["--device=cuda"], None),
        (["--device=cuda", "--kv-memory=auto"], None),
        (["--device=cuda", "--kv-memory=3GiB"], 3 * 2**30),
    ],
    ids=["on a cpu", "given", "on a gpu", "auto", "given on a gpu"],
)
def test_memory_for_keys_and_values_is_asked_for_on_gpus(
    arguments: list[str], expected: int | None
) -> None:
    assert kv_memory(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-memory=auto"], "the device is cpu"),
        (["--device=cuda", "--data-plane=gloo"], "kv_memory must be given with data_plane gloo"),
        (["--kv-memory=0"], "greater than or equal to 1"),
        (["--kv-memory=some"], "error: kv_memory: Input should be 'auto', or: could not parse"),
    ],
    ids=["cpu", "gloo", "nothing", "no number"],
)
def test_memory_that_nobody_can_measure_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        kv_memory(*arguments)


def test_a_rank_is_told_all_shared_settings_and_its_own() -> None:
    arguments = ["--model=/models/demo", "--n-stages=3", "--tp-size=2"]
    arguments += ["--block-size=8", "--log-level=DEBUG", "--transfer-timeout-s=7"]
    worker = WorkerSettings.load("worker", arguments)
    rank = RankSettings.model_validate_json(
        worker.for_rank(1).at(PipelinePlace(1, 2)).model_dump_json()
    )
    shared = set(SharedSettings.model_fields) - {"served_model_name", "n_stages"}
    assert {name: getattr(rank, name) for name in shared} == {
        name: getattr(worker, name) for name in shared
    }
    assert (rank.tp_rank, rank.stage_index, rank.n_stages) == (1, 1, 2)
    assert rank.served_model_name == "demo"
    assert (rank.log_level, rank.log_format) == ("DEBUG", "text")


def test_a_worker_listens_on_this_machine_only_unless_told_otherwise() -> None:
    settings = WorkerSettings.load("worker", ["--model=/models/demo"])
    assert settings.address == "localhost:50053"


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        ([], 2.0),
        (["--device=cuda"], 5.0),
        (["--device=cuda", "--rank-silence-limit-s=3"], 3.0),
    ],
)
def test_a_rank_may_be_silent_for_longer_on_a_gpu(arguments: list[str], limit_s: float) -> None:
    settings = WorkerSettings.load("worker", ["--model=/models/demo", *arguments])
    assert settings.silence_limit_s == limit_s
