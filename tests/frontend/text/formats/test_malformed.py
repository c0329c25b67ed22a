"""Malformed calls of each format are read alike in any pieces, and no word of them is lost."""

import random

import pytest

from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from tests.frontend.text.formats.malformed import SAMPLES, check

N_TEXTS = 15
"""Texts of each format; about 500 of all formats together."""


def test_each_format_has_samples() -> None:
    assert {*SAMPLES} == {*TOOL_FORMATS, *REASONING_FORMATS}


@pytest.mark.parametrize("name", SAMPLES)
def test_malformed_calls_are_read(name: str) -> None:
    dice = random.Random(f"suite-{name}")
    for _ in range(N_TEXTS):
        check(name, dice)
