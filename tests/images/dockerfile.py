"""Reads those parts of the Dockerfile that tests need: stages, their bases, and their
instructions."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Stage:
    """One `FROM` and the instructions below it, as (name, rest of the line)."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, name: str) -> list[str]:
        """Returns the text behind each instruction of that name, in order."""
        return [rest for instruction, rest in self.instructions if instruction == name]


def read_stages() -> dict[str, Stage]:
    """Returns the stages by name. The instructions before the first `FROM` are in the stage named
    ""."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    stage = Stage("", "")
    stages = {"": stage}
    for line in text.replace("\\\n", "").splitlines():
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            base, _, own_name = rest.partition(" AS ")
            stage = stages[own_name] = Stage(own_name, base)
        else:
            stage.instructions.append((name, rest))
    return stages


def lineage(stages: dict[str, Stage], name: str) -> Stage:
    """A stage with everything that it inherits from others, on the image that all are based on."""
    stage = stages[name]
    if stage.base not in stages:
        return stage
    parent = lineage(stages, stage.base)
    return Stage(name, parent.base, parent.instructions + stage.instructions)


def assignments(texts: list[str]) -> dict[str, str]:
    """Returns the values that ENV, ARG and LABEL lines assign; the last one counts."""
    pairs = re.findall(r'(\S+?)=("[^"]*"|\S*)', " ".join(texts))
    return {name: value.strip('"') for name, value in pairs}


def exec_form(text: str) -> list[str]:
    """The words of a command that no shell reads."""
    words = json.loads(text)
    assert isinstance(words, list)
    return [str(word) for word in words]
