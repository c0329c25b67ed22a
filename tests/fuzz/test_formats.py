"""Malformed calls of each format of messages, sent through the readers: `FUZZ_N` of each."""

import random

import pytest

from tests.frontend.text.formats.malformed import SAMPLES, check
from tests.fuzz.rounds import N_INPUTS


@pytest.mark.parametrize("name", SAMPLES)
def test_malformed_calls_are_read(name: str) -> None:
    dice = random.Random(f"fuzz-{name}")
    for _ in range(N_INPUTS):
        check(name, dice)
