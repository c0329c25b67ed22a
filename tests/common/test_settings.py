"""Settings refuse what they do not know, from wherever it comes."""

import pytest
from pydantic import Field, ValidationError

from services.common.settings import ServiceSettings


class Sample(ServiceSettings):
    """Two fields."""

    address: str = "127.0.0.1:0"
    """Where to listen."""

    max_things: int = Field(default=3, ge=1)
    """Things at most."""


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCINUS_MAX_THINGS", "5")
    monkeypatch.setenv("ORCINUS_ADDRESS", "from-environment:1")
    settings = Sample.load("sample", ["--max-things", "7"])
    assert (settings.max_things, settings.address) == (7, "from-environment:1")


def test_a_misspelt_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCINUS_MAX_THING", "5")
    with pytest.raises(SystemExit, match="ORCINUS_MAX_THING"):
        Sample.load("sample", [])


@pytest.mark.parametrize("value", ["0", "many"])
def test_a_wrong_value_is_refused_by_the_name_of_its_field(value: str) -> None:
    with pytest.raises(SystemExit, match=rf"^error: max_things: .* \(it is '{value}'\)"):
        Sample.load("sample", [f"--max-things={value}"])


def test_settings_do_not_change() -> None:
    settings = Sample.load("sample", [])
    with pytest.raises(ValidationError):
        settings.max_things = 4
