"""What a checkpoint is taken for: values and their sources, forms of layers, and what is ignored.

`orcinus check` and the start of a pipeline print the same rows. The workers and the inspection make
the report, since they read checkpoints. It is JSON on its way to programs that know no tensors:
whole for `check`, and as rows for the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from services.common.derived import Derived
from services.common.errors import shortened

_MAX_NAMED = 4
"""Number of things of one kind that a line names."""

_MAX_TEXT = 500
"""Largest number of characters of a row: rows travel on a pipe whose lines are short."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A report about a checkpoint that can be served."""

    derived: Mapping[str, Derived[Any]] = field(default_factory=dict)
    """Values that several files or keys may state, by what they are, such as "context"."""

    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The kinds of matrices, such as `mlp.down_proj`, by the form in which they are in memory."""

    ignored: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What nothing is read from, by what it is: files, keys of config.json, tensors."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Returns the report that `facts` returned."""
        derived = {name: Derived(**value) for name, value in facts.get("derived", {}).items()}
        return cls(derived, facts.get("layers", {}), facts.get("ignored", {}))

    def facts(self) -> dict[str, Any]:
        """Returns the report in the types of JSON."""
        return {
            "derived": {name: asdict(value) for name, value in self.derived.items()},
            "layers": {form: list(kinds) for form, kinds in self.layers.items()},
            "ignored": {what: list(names) for what, names in self.ignored.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Returns the report as pairs of what is said and the text about it."""
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
