"""Reads files that change while a process runs, as Kubernetes changes the Secrets that it mounts.

Files are read again whenever their content is needed; no thread watches them. If the content is
broken or half written, the last valid content stays in use, and the reason is logged once.
"""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Content = TypeVar("Content")
Value = TypeVar("Value")


class Mounted(Generic[Content, Value]):
    """Keeps the content of files up to date. The methods may be called from any thread.

    `read` reads the files and returns content that can be compared, and `parse` makes a value from
    the content. Both functions must raise OSError for an error that may be temporary, and
    ValueError for content that is wrong until the files change. The message of the error must name
    the file.
    """

    def __init__(
        self, name: object, read: Callable[[], Content], parse: Callable[[Content], Value]
    ) -> None:
        """Reads the files for the first time.

        Raises:
            OSError, ValueError: the files have no valid content.
        """
        self._name = name
        self._read = read
        self._parse = parse
        self._lock = threading.Lock()
        self._complaint: str | None = None
        self._rejected: Content | None = None
        self._content = read()
        self._value = parse(self._content)

    def latest(self) -> Value:
        """Returns the value of the newest valid content. Returns the same object as long as the
        content does not change."""
        with self._lock:
            try:
                self._refresh()
            except (OSError, ValueError) as error:
                self._complain(str(error))
            return self._value

    def _refresh(self) -> None:
        content = self._read()
        if content == self._rejected:
            return
        if content != self._content:
            try:
                self._value = self._parse(content)
            except ValueError:
                self._rejected = content  # the same broken content is parsed only once
                raise
            self._content = content
            log.info("%s has changed and is in use", self._name)
        self._rejected = None
        self._complaint = None

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            log.error("%s; what was there before stays in use", message)
        self._complaint = message
