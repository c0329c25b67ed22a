"""Steps are the same in Python and in C++, which nothing but their order ties together."""

import dataclasses
import re
from pathlib import Path

import kernels
from kernels.steps import STEPS

SOURCES = Path(kernels.__file__).parent / "native" / "src"
STRUCTURE = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (?!static )\w[\w:<>*& ]*?[ *](\w+)(?: = [^;]+)?;", re.MULTILINE)
NUMBERED = re.compile(r"run_of<([^>]+)>\(step->kind\)")


def structures() -> dict[str, list[str]]:
    """Returns the names of the fields of every C++ structure, by its name."""
    return {
        name: FIELD.findall(body)
        for path in SOURCES.glob("*.h")
        for name, body in STRUCTURE.findall(path.read_text())
    }


def test_both_languages_number_the_steps_alike() -> None:
    [names] = NUMBERED.findall((SOURCES / "layers.cpp").read_text())
    assert re.split(r",\s*", names) == [step.__name__ for step in STEPS]


def test_both_languages_have_the_same_fields_in_the_same_order() -> None:
    found = structures()
    for step in STEPS:
        assert found[step.__name__] == [field.name for field in dataclasses.fields(step)]
