"""Names of modules, and expressions for names, in the settings of a quantised checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from services.common.cannot_start import CannotStart
from services.worker.models.name_pattern import NamePattern

_PATTERN = "re:"  # prefix of a target that is a regular expression

MAX_PATTERNS = 1000
"""Largest number of regular expressions; published files have less than a hundred."""

MAX_MATCHING_S = 60.0
"""Largest processor time for matching names with regular expressions, in seconds. A model with ten
thousand experts and ten expressions takes one second."""


class ModuleTargets:
    """Assigns modules to lists of targets. A target is the name of a module or a regular expression
    for names. A module belongs to the first list that has its name, or a part of its name (see
    `_parts`). If no list has such a name, the module belongs to the first list with a regular
    expression that matches its name."""

    def __init__(
        self, lists: Sequence[Sequence[str]], *, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock` returns processor time in seconds. Raises ValueError for an invalid regular
        expression, or one that is not supported."""
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, str, NamePattern]] = []
        self._clock = clock
        self._left_s = MAX_MATCHING_S
        for index, targets in enumerate(lists):
            for target in targets:
                self._add(index, target)

    def _add(self, index: int, target: str) -> None:
        if not target.startswith(_PATTERN):
            self._names.setdefault(target, index)
            return
        if len(self._patterns) == MAX_PATTERNS:
            raise ValueError(f"more than {MAX_PATTERNS} regular expressions for names of modules")
        expression = target.removeprefix(_PATTERN)
        self._patterns.append((index, target, NamePattern(expression)))

    def of(self, module: str) -> int | None:
        """Returns the index of the list to which a module belongs, or None if it belongs to none.
        Raises CannotStart if matching regular expressions has taken more than MAX_MATCHING_S
        seconds."""
        named = [self._names[part] for part in _parts(module) if part in self._names]
        return min(named) if named else self._matched(module)

    def _matched(self, module: str) -> int | None:
        for index, target, pattern in self._patterns:
            began = self._clock()
            is_matched = pattern.matches(module)
            self._left_s -= self._clock() - began
            if self._left_s < 0:
                raise CannotStart(
                    "config.json: quantization_config: regular expressions such as "
                    f"{target[:80]!r} take more than {MAX_MATCHING_S:g} s to match with names "
                    "of modules"
                )
            if is_matched:
                return index
        return None


def _parts(module: str) -> Iterator[str]:
    """Yields every contiguous run of the dot-separated parts of a module's name: for `a.b.c`, `a`,
    `a.b`, `a.b.c`, `b`, `b.c` and `c`."""
    words = module.split(".")
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            yield ".".join(words[start:stop])
