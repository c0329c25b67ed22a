"""The reasons why an answer ends."""

from enum import StrEnum


class FinishReason(StrEnum):
    """The reason why an answer ended, as the OpenAI API spells it."""

    STOP = "stop"
    LENGTH = "length"
