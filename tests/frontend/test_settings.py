"""Settings come from the command line or the environment, and wrong ones end the start."""

import re
from pathlib import Path

import pytest

from services.common.by_model import for_all
from services.frontend.settings import FrontendSettings
from services.scheduler.settings import SchedulerSettings
from tests.listeners import cells_under

NEEDED = ["--model", "models/x", "--scheduler", "host:1"]


def test_command_line_sets_what_it_names() -> None:
    settings = FrontendSettings.load(
        "frontend", [*NEEDED, "--http-address", "0.0.0.0:0", "--drain-s", "5", "--ready-fd=7"]
    )
    assert settings.models[0].path == Path("models/x")
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
        ("client-silence-limit-s", "0"),
        ("client-silence-limit-s", "1e6"),
        ("log-level", "LOUD"),
    ],
    ids=str,
)
def test_wrong_setting_is_named(option: str, value: str) -> None:
    with pytest.raises(SystemExit, match=option.replace("-", "_")):
        FrontendSettings.load("frontend", [*NEEDED, f"--{option}={value}"])


def test_the_page_on_security_names_the_limits_and_their_defaults() -> None:
    header, *rows = cells_under("Limits of the public side")
    assert header[:3] == ["limit", "setting", "default"]
    fields = FrontendSettings.model_fields | SchedulerSettings.model_fields
    named = set()
    for _, settings, default, *_ in rows:
        for name in re.findall("`([a-z_]+)`", settings):
            value = fields[name].default
            sizes = (f"{value / 2**10:g} KiB", f"{value / 2**20:g} MiB", f"{value / 1e6:.1f} mill")
            forms = (f"{value:,}", f"{value:,.0f}", *sizes)
            assert any(form in default for form in forms), (name, value, default)
            named.add(name)
    limits = {name for name in FrontendSettings.model_fields if name.startswith("max_")}
    timed = {"head_limit_s", "body_limit_s", "idle_limit_s", "send_limit_s", "render_limit_s"}
    assert named >= limits | timed


@pytest.mark.parametrize(
    ("context", "given", "n_characters"),
    [
        (None, {}, 2_097_152),
        (131_072, {}, 2_097_152),
        (4_096, {}, 262_144),
        (16_384, {}, 262_144),
        (32_768, {}, 524_288),
        (10_000_000, {}, 8 * 2**20),
        (131_072, {"max_body_bytes": 1000}, 262_144),
        (131_072, {"max_prompt_characters": 7}, 7),
    ],
)
def test_the_limit_on_characters_follows_the_context(
    tmp_path: Path, context: int | None, given: dict[str, int], n_characters: int
) -> None:
    if context is not None:
        (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": {context}}}')
    model, scheduler = for_all(tmp_path), for_all("host:1")
    settings = FrontendSettings(model=model, scheduler=scheduler, **given)  # type: ignore[arg-type]
    assert settings.n_prompt_characters(settings.models[0].path) == n_characters
    less = FrontendSettings(model=model, scheduler=scheduler, max_prompt_characters=7)
    part = "max_prompt_characters"
    assert settings.memory_parts()[part] >= less.memory_parts()[part] > 0


TWO = ["--model=a=/a,b=/b", "--scheduler=a=h:1,b=h:2"]


def test_each_model_has_its_own_settings() -> None:
    settings = FrontendSettings.load("frontend", [*TWO, "--tool-parser=hermes,b=none"])
    assert [
        (model.names, model.path, model.scheduler, model.tool_parser, model.reasoning_parser)
        for model in settings.models
    ] == [
        (("a",), Path("/a"), "h:1", "hermes", "auto"),
        (("b",), Path("/b"), "h:2", "none", "auto"),
    ]
    template = "Query={query}, and {document}"
    of_pairs = FrontendSettings.load("frontend", [*TWO, f"--pair-template=b={template}"])
    assert [model.pair_template for model in of_pairs.models] == ["", template]
    one = FrontendSettings.load("frontend", ["--model=/a", "--scheduler=h:1"])
    assert [model.names for model in one.models] == [()]
    assert sum(settings.memory_parts().values()) > sum(one.memory_parts().values())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model=a=/a,b=/b", "--scheduler=h:1"], "scheduler: the model a has no address"),
        ([*TWO, "--scheduler=c=h:3"], "scheduler: `model` has no model named c"),
        ([*TWO, "--tool-parser=c=none"], "tool_parser: `model` has no model named c"),
        (
            [*TWO, "--pair-template=c={query}{document}"],
            "pair_template: `model` has no model",
        ),
        ([*TWO, "--pair-template=b={query}"], "pair_template: has no place {document}"),
        ([*TWO, "--served-model-name=x"], "served_model_name: not together with a NAME"),
        ([*TWO, "--model=/c"], "model: several models need a name each"),
        ([*TWO, "--model=a=/c"], "model: has several values for the model a"),
        (["--model=/a", "--scheduler=a=h"], "scheduler: 'h' is not host:port"),
    ],
)
def test_models_whose_settings_do_not_match_are_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: {re.escape(reason)}"):
        FrontendSettings.load("frontend", arguments)
