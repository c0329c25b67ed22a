"""The rows of the ranks' request tables: each admitted request has one."""


class Rows:
    """Gives each row to at most one request at a time. The row that became free last is reused
    first."""

    def __init__(self, max_rows: int | None) -> None:
        """`max_rows` limits the number of rows, for a model whose layers keep a state of each
        request. With None, the tables grow as needed."""
        self.max_rows = max_rows
        self._free: list[int] = []
        self._n_rows = 0

    @property
    def has_free(self) -> bool:
        """Whether a row is free for another request."""
        return self.max_rows is None or bool(self._free) or self._n_rows < self.max_rows

    def take(self) -> int:
        """Returns a row that no request has. A free row must exist."""
        if self._free:
            return self._free.pop()
        self._n_rows += 1
        return self._n_rows - 1

    def give_back(self, row: int) -> None:
        """Frees a row whose request no longer needs it."""
        self._free.append(row)
