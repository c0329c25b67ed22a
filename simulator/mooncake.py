"""The trace of Mooncake: an hour of a chat service, from its publisher's file (`conversation.jsonl`
of https://github.com/kvcache-ai/Mooncake, FAST'25).

A line has the time of arrival, the lengths, and ids of the prompt's blocks of 512 tokens; equal ids
stand for equal blocks.
"""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from services.scheduler.core.request import TOKEN_ID

MOONCAKE_BLOCK = 512
FIRST_TOKEN = 1000
"""Smallest id of a token in a prompt. Sampled tokens have lower ids, so that no prompt contains a
sampled token."""


class Row(NamedTuple):
    """A request of Mooncake's file."""

    time_s: float
    n_prompt: int
    n_output: int
    block_ids: Sequence[int]

    @property
    def conversation(self) -> int:
        """Id of the first block in which conversations differ: the second block, or the first one
        if there is no other."""
        return self.block_ids[min(1, len(self.block_ids) - 1)]

    @property
    def prompt(self) -> "array[int]":
        """The tokens of the prompt; equal blocks have equal tokens."""
        runs = [(FIRST_TOKEN + one, MOONCAKE_BLOCK) for one in self.block_ids]
        return repeated(runs)[: self.n_prompt]


def read_mooncake(path: Path) -> list[Row]:
    """Returns the requests of the publisher's file.

    Raises:
        ValueError: a line is malformed.
    """
    with path.open() as file:
        return [_row(path, number, line) for number, line in enumerate(file, 1)]


def _row(path: Path, number: int, line: str) -> Row:
    """Returns the request of a line of Mooncake's file.

    Raises:
        ValueError: the line is malformed.
    """
    try:
        values = json.loads(line)
        ids = [int(one) for one in values["hash_ids"]]
        time_s = float(values["timestamp"]) / 1e3
        row = Row(time_s, int(values["input_length"]), int(values["output_length"]), ids)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: no request of Mooncake: {error!r}") from error
    if not ids or not 0 < row.n_prompt <= len(ids) * MOONCAKE_BLOCK:
        raise ValueError(f"{path}, line {number}: no request of Mooncake: {len(ids)} blocks")
    return row


def repeated(runs: Sequence[tuple[int, int]]) -> "array[int]":
    """Returns one sequence of runs of equal tokens. Each run is a token and its number of
    repetitions."""
    tokens = array(TOKEN_ID)
    for token, n in runs:
        tokens += array(TOKEN_ID, [token]) * n
    return tokens
