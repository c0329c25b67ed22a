"""Settings come from the command line or the environment, and wrong ones end the start."""

from pathlib import Path

import pytest

from services.frontend.settings import FrontendSettings

NEEDED = ["--model", "models/x", "--scheduler", "host:1"]


def test_command_line_sets_what_it_names() -> None:
    settings = FrontendSettings.load(
        "frontend", [*NEEDED, "--http-address", "0.0.0.0:0", "--drain-s", "5", "--ready-fd=7"]
    )
    assert settings.model == Path("models/x")
    assert (settings.http_address, settings.drain_s, settings.ready_fd) == ("0.0.0.0:0", 5.0, 7)


def test_environment_sets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCINUS_MAX_BODY_BYTES", "1000")
    assert FrontendSettings.load("frontend", NEEDED).max_body_bytes == 1000


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("http-address", "8000"),
        ("http-address", "localhost:99999"),
        ("grpc-address", "localhost:http"),
        ("max-body-bytes", "0"),
        ("drain-s", "-1"),
        ("log-level", "LOUD"),
    ],
    ids=str,
)
def test_wrong_setting_is_named(option: str, value: str) -> None:
    with pytest.raises(SystemExit, match=option.replace("-", "_")):
        FrontendSettings.load("frontend", [*NEEDED, f"--{option}={value}"])
