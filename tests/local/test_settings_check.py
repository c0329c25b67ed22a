"""What the launcher refuses before it starts anything, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.by_model import for_all
from services.local.settings import LocalSettings
from services.local.settings_check import is_open_to_all, trouble_with
from tests.checkpoints import write_checkpoint
from tests.ggufs import write_gguf
from tests.limits import HANG_S


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_stages_up_to_the_number_of_layers_are_taken(model: Path) -> None:
    assert trouble_with(LocalSettings(model=for_all(model), stages=2)) == ""
    expected = "stages: 2 layers cannot be divided among 3 stages"
    assert trouble_with(LocalSettings(model=for_all(model), stages=3)) == expected


def test_more_pipelines_than_the_scheduler_may_form_are_refused(model: Path) -> None:
    few = LocalSettings(model=for_all(model), pipelines=2, scheduler=(("max-pipelines", "1"),))
    expected = "pipelines: 2 are more than max_pipelines=1 of the scheduler"
    assert trouble_with(few) == expected
    assert trouble_with(few.model_copy(update={"pipelines": 1})) == ""


def test_what_two_frontends_cannot_share_is_refused(model: Path) -> None:
    given = [f"--model={model}", "--frontend=grpc_socket=/run/s"]
    assert trouble_with(LocalSettings.load("local", [*given, "--frontends=1"])) == ""
    expected = "frontend: grpc-socket is for one frontend, and frontends is 2"
    assert trouble_with(LocalSettings.load("local", [*given, "--frontends=2"])) == expected


def test_adapters_that_are_missing_or_ambiguous_are_refused(model: Path) -> None:
    adapters = (("law", model / "law"),)
    settings = LocalSettings(model=for_all(model), adapters=adapters)
    expected = f"adapters: no adapter_config.json in {model / 'law'}, which is to be law"
    assert trouble_with(settings) == expected
    (model / "law").mkdir()
    (model / "law" / "adapter_config.json").touch()
    assert trouble_with(settings) == ""
    two = (("a", model), ("b", model))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": two, "adapters": adapters}, "only if one model is served"),
        ({"model": for_all(model), "adapters": for_all(model)}, "needs a name"),
        ({"model": (("law", model),), "adapters": adapters}, "law is the name of the model"),
    ]
    for options, why in wrong:
        with pytest.raises(ValidationError, match=why):
            LocalSettings(**options)


def test_the_layers_of_gpt2_count_too(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"n_layer": 1}), encoding="utf-8")
    assert "1 layers" in trouble_with(LocalSettings(model=for_all(model), stages=2))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_missing_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    assert trouble_with(LocalSettings(model=for_all(model))) == f"model: no {name} in {model}"


@pytest.mark.parametrize(
    "names", [("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")]
)
def test_a_tokenizer_may_have_another_form(model: Path, names: tuple[str, ...]) -> None:
    (model / "tokenizer.json").unlink()
    for name in names:
        assert (
            trouble_with(LocalSettings(model=for_all(model)))
            == f"model: no tokenizer.json in {model}"
        )
        (model / name).touch()
    assert trouble_with(LocalSettings(model=for_all(model))) == ""


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "m.gguf")
    assert trouble_with(LocalSettings(model=for_all(file), stages=3)) == ""
    expected = "stages: 3 layers cannot be divided among 4 stages"
    assert trouble_with(LocalSettings(model=for_all(file), stages=4)) == expected
    file.write_bytes(b"GGUF")
    assert trouble_with(LocalSettings(model=for_all(file))).startswith(f"model: {file} ends inside")
    other = file.rename(tmp_path / "m.bin")
    expected = f"model: {other} is no directory and no GGUF file"
    assert trouble_with(LocalSettings(model=for_all(other))) == expected


def test_a_broken_configuration_is_named(model: Path) -> None:
    (model / "config.json").write_text("[]", encoding="utf-8")
    assert trouble_with(LocalSettings(model=for_all(model))).startswith(
        f"model: {model / 'config.json'}"
    )


@pytest.mark.parametrize(
    ("options", "is_open"),
    [
        pytest.param({}, False, id="default"),
        pytest.param({"host": "localhost"}, False, id="localhost"),
        pytest.param({"host": "::1"}, False, id="loopback-of-ipv6"),
        pytest.param({"host": "[::1]"}, False, id="in-brackets"),
        pytest.param({"host": "0.0.0.0"}, True, id="all-addresses"),
        pytest.param({"host": "[::]"}, True, id="all-addresses-of-ipv6"),
        pytest.param({"host": "my-machine"}, True, id="name"),
        pytest.param({"host": "0.0.0.0", "api_keys_file": "keys"}, False, id="with-keys"),
    ],
)
def test_who_may_call_without_a_key(options: dict[str, Any], is_open: bool) -> None:
    assert is_open_to_all(LocalSettings(model=for_all(Path("model")), **options)) is is_open


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--model=/no/such"], "model: there is no directory /no/such", id="model"),
        pytest.param([], "model: must be given", id="missing"),
        pytest.param(
            ["--nonsense=3"],
            "unrecognized arguments: --nonsense=3; --help lists all settings",
            id="unknown",
        ),
    ],
)
def test_a_refusal_is_one_line(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "services.local", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"error: {said}\n")
