"""`orcinus receipt-key`: makes a key that signs receipts.

The new key becomes the first key of the file, which is the key that signs. With `--rotate`, the
keys that were in the file before follow the new key, so that they are still published.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from services.common.ending import give_up
from services.receipts.keys import SigningKeys, new_key

MODE = 0o600
"""Mode of the file: only its owner may read or write it."""


def main(arguments: Sequence[str]) -> int:
    """Writes a key file and prints the id of the new key. Returns the exit status. It is 1 if the
    file cannot be written, if it exists and `--rotate` is not given, or if `--rotate` is given and
    the file has no keys."""
    parser = argparse.ArgumentParser(
        prog="orcinus receipt-key", description="Makes a key that signs receipts of answers."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file of the keys")
    parser.add_argument(
        "--rotate", action="store_true", help="put the key before those that the file has"
    )
    options = parser.parse_args(arguments)
    try:
        made = write_key(options.file, rotates=options.rotate)
    except (OSError, ValueError) as error:
        return give_up(error, ready_fd=None)
    sys.stdout.write(f"{made}\n")
    return 0


def write_key(file: Path, *, rotates: bool) -> str:
    """Writes a new key to a file and returns the id of the key. If `rotates` is true, the file must
    exist, and its earlier keys are kept behind the new key. The file is replaced in one step.

    Raises:
        OSError: the file cannot be written, or exists and `rotates` is false.
        ValueError: `rotates` is true and the file has no keys.
    """
    earlier = b""
    if rotates:
        earlier = file.read_bytes()
        try:
            SigningKeys.parse(earlier)
        except ValueError as error:
            raise ValueError(f"{file} {error}") from error
    elif file.exists():
        raise FileExistsError(f"{file} exists; --rotate puts a new key before its keys")
    content = new_key() + earlier
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as scratch:
        try:
            os.fchmod(scratch.fileno(), MODE)
            scratch.write(content)
            scratch.flush()
            Path(scratch.name).replace(file)
        finally:  # no private key is left behind, whatever ends this
            Path(scratch.name).unlink(missing_ok=True)
    return SigningKeys.parse(content).id
