"""Opens a regular file at a path whose links were followed and checked before.

Another process may put a link or a pipe at this path after the check. So files are opened in a way
that refuses a link as the last part of the path and does not wait for the writer of a pipe. Then
the type of the opened file is checked.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading.

    Raises:
        OSError: the file cannot be opened, is a link, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_regular_by_links(path: Path) -> BinaryIO:
    """Opens the file to which `path` and its links lead, for reading. Raises OSError if the file
    cannot be opened, or is no regular file."""
    return open_regular(Path(os.path.realpath(path)))
