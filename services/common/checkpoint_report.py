"""A report on what the program has read from a checkpoint: values and their sources, the forms of
layers, and what is ignored.

`orcinus check` and the start of a pipeline print the same rows. The programs that read checkpoints
make the report: the workers, and `services.cli.inspection` for `orcinus check`. Programs that do
not import the code for tensors receive the report as JSON. `orcinus check` receives the whole
report, and the launcher receives only the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from services.common.derived import Derived
from services.common.errors import shortened

_MAX_NAMED = 4
"""Largest number of names of one kind that a row lists."""

_MAX_TEXT = 500
"""Largest number of characters of a row. Rows are sent over a pipe, whose lines must be short."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A report about a checkpoint that can be served."""

    derived: Mapping[str, Derived[Any]] = field(default_factory=dict)
    """Values that several files or keys may state, by the name of the value, such as "context"."""

    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of matrices, such as `mlp.down_proj`, by the form that the matrices have in memory.
    """

    ignored: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of parts of the checkpoint that are not used, by their kind: files, keys of
    config.json, tensors."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Restores a report from the object that the report's method `facts` has returned."""
        derived = {name: Derived(**value) for name, value in facts.get("derived", {}).items()}
        return cls(derived, facts.get("layers", {}), facts.get("ignored", {}))

    def facts(self) -> dict[str, Any]:
        """Returns the report as an object that can be written as JSON."""
        return {
            "derived": {name: asdict(value) for name, value in self.derived.items()},
            "layers": {form: list(kinds) for form, kinds in self.layers.items()},
            "ignored": {what: list(names) for what, names in self.ignored.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Returns the report as rows, which are pairs of a label and a text."""
        values = [
            (name, f"{_in_words(value.value)} ({value.source})")
            for name, value in self.derived.items()
        ]
        forms = [("matrices", f"{form}: {_some(kinds)}") for form, kinds in self.layers.items()]
        unread = [("ignored", f"{what}: {_some(names)}") for what, names in self.ignored.items()]
        rows = values + (forms if len(forms) > 1 else []) + unread
        return [(name, shortened(text, _MAX_TEXT)) for name, text in rows]


def _in_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return _some([*map(str, value)]) or "none"
    return f"{value:,}" if type(value) is int else str(value)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
