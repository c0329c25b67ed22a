"""Durations of a run of tests, read from the files that test runners write."""

import re
from pathlib import Path
from xml.etree import ElementTree

_DURATION = re.compile(r"^\s*([\d.]+)\s*s?\s+\S", re.MULTILINE)
"""Pattern of a line of `pytest --durations=0`, or of any list of seconds and names."""


def minutes_of(path: Path) -> float:
    """Returns the sum of the durations of all tests in a file, in minutes.

    Raises:
        ValueError: the file is neither JUnit's XML nor a list of seconds and names.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".xml":
        try:
            suites = ElementTree.fromstring(text).iter("testsuite")
        except ElementTree.ParseError as error:
            raise ValueError(f"{path} is not XML: {error}") from error
        return sum(float(suite.get("time", 0)) for suite in suites) / 60
    seconds = [float(found) for found in _DURATION.findall(text)]
    if not seconds:
        raise ValueError(f"{path} has no durations")
    return sum(seconds) / 60
