"""Why an answer ended."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended, as the OpenAI API spells it."""

    STOP = "stop"
    LENGTH = "length"
