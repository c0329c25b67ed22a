"""The reference of all settings, `docs/settings.md`, made from the settings classes and `k8s/base`.

`python -m tests.settings_page` writes it. A row has the setting's name, its type with range and
unit, its default, its value in `k8s/base` if that differs from the default, and its description
from the settings class.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from services.common.settings import PREFIX, ServerSettings, ServiceSettings
from services.frontend.settings import FrontendSettings
from services.local.settings import LocalSettings
from services.scheduler.settings import SchedulerSettings
from services.tune.settings import TuneSettings
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
BASE = ROOT / "k8s" / "base" / "kustomization.yaml"

COMMAND = "python -m tests.settings_page"

UNITS: Mapping[str, str] = {
    r"_per_s": "per second",
    r"_s": "seconds",
    r"_bytes": "bytes",
    r"_characters": "characters",
    r"_tokens|n_slots|block_size|model_len": "tokens",
    r"_batch_size|requests|rate": "requests",
    r"pipeline_depth": "batches",
    r"pipelines": "pipelines",
    r"_workers|spares": "workers",
    r"_port": "port",
    r"stages|stage_index": "stages",
    r"tp|tp_size|max_ranks": "ranks",
    r"n_threads|threads": "threads",
    r"frontends": "frontends",
    r"max_connections": "connections",
    r"max_headers": "headers",
    r"_adapters": "adapters",
    r"max_in_flight|max_answers_at_once": "answers",
    r"max_viewers": "streams",
    r"_fraction|_share": "share",
    r"_fd": "descriptor",
    r"seed": "number",
}
"""Units of numbers, by the ends of settings' names; the first that fits counts."""

SECTIONS: Mapping[str, tuple[type[ServiceSettings], str, str]] = {
    "Every service": (
        ServerSettings,
        "Frontend, scheduler and worker have these settings besides their own.",
        "",
    ),
    "Frontend": (
        FrontendSettings,
        "Set in `k8s` by the ConfigMap `orcinus-frontend-settings`, on one machine by `--frontend "
        "NAME=VALUE`.",
        "orcinus-frontend-settings",
    ),
    "Scheduler": (
        SchedulerSettings,
        "Set in `k8s` by the ConfigMap `orcinus-scheduler-settings`, on one machine by "
        "`--scheduler NAME=VALUE`.",
        "orcinus-scheduler-settings",
    ),
    "Worker": (
        WorkerSettings,
        "Set in `k8s` by the ConfigMap `orcinus-worker-settings`, on one machine by `--worker "
        "NAME=VALUE`.",
        "orcinus-worker-settings",
    ),
    "One machine": (
        LocalSettings,
        "Options of `make run ARGS=…`, `orcinus serve` and `python -m services.local`. What "
        "`--frontend`,\n`--scheduler` and `--worker` name wins over the others.",
        "",
    ),
    "Tuner": (TuneSettings, "Options of `make tune ARGS=…` and `orcinus tune`.", ""),
}

PIPELINE = "orcinus-pipeline"
"""The ConfigMap whose settings several services read."""

HEAD = f"""# Settings

This page is for operators who look for a setting: each with its unit, its default and its reason.

An example. The setting `max_batch_tokens` of the scheduler can be given in three ways:

    ORCINUS_MAX_BATCH_TOKENS=1024                       # an environment variable of the scheduler
    python -m services.scheduler --max-batch-tokens 1024 …          # an option of the scheduler
    make run ARGS="--scheduler max-batch-tokens=1024"   # through the launcher on one machine

The rule: the variable is `{PREFIX}` and the name in capitals, the option is the name with hyphens,
and an option wins over a variable. A boolean option has a counterpart: `--page` and `--no-page`. A
variable that begins with `{PREFIX}` and names no setting ends the process at start, and so does a
value outside its range; the message says which. Settings are read once, at start: changing one
restarts the service.

Variables of other programs have no `{PREFIX}`, and the pages of their subjects describe them:
`HF_TOKEN` and `AWS_…` in [checkpoints](checkpoints.md#where-a-model-may-be), `MODEL_SOURCE` in
[deploying](operations/deploy.md#where-the-checkpoint-comes-from), `OTEL_…` in
[tracing](tracing.md#turning-traces-on) and `NCCL_…` in [sizing](operations/size.md#nccl).

*None* as a default means "not set"; the last column says what then happens. `k8s/base` sets some
settings to another value than the default, which the column "`k8s/base`" shows. What settings do
together is explained where they are needed: memory and batches in [size](operations/size.md),
certificates and keys in [secure](operations/secure.md), weights of keys in
[share](operations/share.md), and times to wait in [lose a node](operations/lose-a-node.md).

This page is made from the code: `{COMMAND}` writes it.
"""


def page() -> str:
    """Returns the text of the page that follows from the code."""
    return "\n".join([HEAD, *(line for name in SECTIONS for line in _section(name))])


def settings_of(name: str) -> dict[str, FieldInfo]:
    """Returns the settings of a section. Settings of every service are in a section of their
    own."""
    kind, _, _ = SECTIONS[name]
    fields = kind.model_fields
    if issubclass(kind, ServerSettings) and kind is not ServerSettings:
        return {key: field for key, field in fields.items() if key not in _shared()}
    return dict(fields)


def unit_of(name: str) -> str:
    """Returns the unit of a setting that is a number; empty if no rule of `UNITS` knows it."""
    return next((unit for end, unit in UNITS.items() if re.search(rf"({end})$", name)), "")


def numbers() -> set[str]:
    """Returns the names of all settings that are numbers."""
    return {
        name
        for kind, _, _ in SECTIONS.values()
        for name in kind.model_fields
        if any(branch.get("type") in ("integer", "number") for branch in _branches(kind, name))
    }


def _shared() -> frozenset[str]:
    return frozenset(ServerSettings.model_fields)


def _section(name: str) -> Iterator[str]:
    kind, about, config = SECTIONS[name]
    in_base = {**_base().get(PIPELINE, {}), **_base()[config]} if config else {}
    yield f"## {name}\n"
    yield f"{about}\n"
    head = ("setting", "type, unit", "default", *(("`k8s/base`",) if config else ()), "meaning")
    yield _row(head)
    yield _row(("---",) * len(head))
    for key, field in settings_of(name).items():
        default = _default(field)
        set_there = in_base.get(f"{PREFIX}{key}".upper())
        yield _row(
            (
                f"`{key}`",
                _type(kind, key),
                default,
                *((_code(set_there) if set_there is not None else "",) if config else ()),
                " ".join((field.description or "").split()).replace("|", r"\|"),
            )
        )
    yield ""


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


@cache
def _base() -> dict[str, dict[str, str]]:
    """Returns the literals of the ConfigMaps of `k8s/base`, by name."""
    made = yaml.safe_load(BASE.read_text(encoding="utf-8"))["configMapGenerator"]
    return {one["name"]: dict(literal.split("=", 1) for literal in one["literals"]) for one in made}


@cache
def _properties(kind: type[ServiceSettings]) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = kind.model_json_schema()["properties"]
    return properties


def _branches(kind: type[ServiceSettings], name: str) -> list[Mapping[str, Any]]:
    """Returns the alternatives of a setting's JSON schema, without null."""
    schema = _properties(kind)[name]
    return [branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null"]


def _type(kind: type[ServiceSettings], name: str) -> str:
    return " or ".join(_plain_type(name, branch) for branch in _branches(kind, name))


def _plain_type(name: str, branch: Mapping[str, Any]) -> str:
    if "enum" in branch or "const" in branch:
        return ", ".join(f"`{value}`" for value in branch.get("enum", [branch.get("const")]))
    if (one := _of_one_model(branch)) is not None:
        return f"{_plain_type(name, one)}; also by model"
    kind = branch.get("type")
    if kind in ("integer", "number"):
        return ", ".join(filter(None, (unit_of(name), _range(branch))))
    if name.endswith("kv_memory"):
        return "size in bytes"
    names = {"boolean": "`true`, `false`", "array": "list"}
    return names.get(str(kind), "path" if branch.get("format") == "path" else "text")


def _of_one_model(branch: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema of the value of a setting that may have a value for each model, or None
    for other settings."""
    match branch:
        case {"items": {"prefixItems": [{"pattern": _}, value]}}:
            found: Mapping[str, Any] = value
            return found
    return None


def _range(branch: Mapping[str, Any]) -> str:
    low, high = branch.get("minimum"), branch.get("maximum")
    above, below = branch.get("exclusiveMinimum"), branch.get("exclusiveMaximum")
    parts = [
        f"from {low:g}" if low is not None else "",
        f"above {above:g}" if above is not None else "",
        f"to {high:,}" if high is not None else "",
        f"below {below:g}" if below is not None else "",
    ]
    return " ".join(filter(None, parts))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "*None*"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable()}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) or value < 2**16 else f"{value:,}"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return ", ".join(f"`{one}`" for _, one in value)  # by model
    if isinstance(value, tuple):
        return f"`{'-'.join(map(str, value))}`" if value else "*empty*"
    return f"`{value}`" if str(value) else "*empty*"


def _code(value: str) -> str:
    return f"`{value}`"


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
