"""Commands, settings and metrics that the README and docs name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.__main__ import COMMANDS
from services.common import semconv
from services.common.protocol import PROTOCOL
from services.common.settings import PREFIX
from services.common.watch_json import HEADER
from tests.settings_page import SECTIONS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CLIENTS = ROOT / "clients" / "python" / "README.md"
SETTINGS = {name for kind, _, _ in SECTIONS.values() for name in kind.model_fields}
OURS = {path.name for path in ROOT.iterdir() if path.is_dir()}
MACROS = {"ORCINUS_EXPORT", "ORCINUS_FIELDS"}
"""Macros of the native library, which begin as variables of settings do."""
METRICS = {value for value in vars(semconv).values() if isinstance(value, str)}

each_page = pytest.mark.parametrize("page", [*PAGES, CLIENTS], ids=lambda page: page.name)


def commands(page: Path) -> Iterator[str]:
    """Yields the commands of a page: its indented lines and the code in its sentences, each up to
    its comment. A line that ends with a backslash goes on with the next one."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    for indented, quoted in re.findall(r"^ {4,}(\S.*)$|`([^`\n]+)`", text, flags=re.M):
        yield re.split(r"\s#\s", indented or quoted)[0]


def has_module(name: str) -> bool:
    """Returns whether `python -m` of a module of the repository runs a file."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@each_page
def test_variables_of_settings_exist(page: Path) -> None:
    named = set(re.findall(rf"\b{PREFIX}[A-Z0-9_]+", page.read_text(encoding="utf-8")))
    assert named - MACROS <= {f"{PREFIX}{name}".upper() for name in SETTINGS}


@each_page
def test_modules_that_are_run_exist(page: Path) -> None:
    named = re.findall(r"python -m ([\w.]+)", page.read_text(encoding="utf-8"))
    ours = [name for name in named if name.split(".")[0] in OURS]
    assert [name for name in ours if not has_module(name)] == []


@each_page
def test_subcommands_exist(page: Path) -> None:
    program = re.compile(r"^(?:\.venv/bin/)?orcinus ([a-z-]+)")
    named = [match[1] for line in commands(page) if (match := program.match(line))]
    assert set(named) <= set(COMMANDS)


@each_page
def test_options_of_services_exist(page: Path) -> None:
    services = r"python -m services\.(?:local|frontend|scheduler|worker)"
    program = re.compile(rf"^(?:\.venv/bin/)?(?:orcinus serve|make run|{services}) ")
    named = {
        option.replace("-", "_")
        for line in commands(page)
        if program.match(line)
        for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", line)
    }
    assert {name for name in named if name.removeprefix("no_") not in SETTINGS} == set()


@each_page
def test_variables_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([A-Z_]+)\s*[?:]?=|\$[({]([A-Z_]+)", makefile, flags=re.M))
    calls = [line.partition("make ")[2] for line in commands(page) if "make " in line]
    named = {name for call in calls for name in re.findall(r" ([A-Z_]{2,})=", call)}
    assert named <= {name for pair in known for name in pair}


@each_page
def test_metrics_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:orcinus|gen_ai_server)_[a-z0-9_]+[a-z0-9]", text))
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named - METRICS}
    assert metrics - {"orcinus_client"} <= METRICS


def test_the_page_of_versions_has_the_numbers_of_the_code() -> None:
    text = (ROOT / "docs" / "operations" / "versions.md").read_text(encoding="utf-8")
    assert f"`PROTOCOL` in `services/common/protocol.py`, now {PROTOCOL} |" in text
    assert f"the version in the first line, now {HEADER['version']} |" in text


def test_the_changes_have_the_number_of_the_protocol() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## 0.1.0")[0]
    assert re.findall(r"`PROTOCOL`[^.]*? is (\d+)\.", changes) == [str(PROTOCOL)]
