"""Durations that a run of the tests has seen."""


class Figures:
    """Durations that a run has seen, printed at its end."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def add(self, what: str, seconds: float) -> None:
        """Records one duration."""
        self._lines.append(f"{seconds:8.1f} s  {what}")
