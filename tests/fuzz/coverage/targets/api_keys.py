"""The file of API keys, and the headers that are looked up in it."""

import contextlib
import json
from pathlib import Path
from unittest.mock import Mock

from services.common import errors
from services.frontend.api_keys import ApiKeys, hash_of
from tests.fuzz.coverage.target import Choices, Target, any_bytes

ENTRY = {
    "name": "alice",
    "sha256": hash_of("orc-key"),
    "requests_per_minute": 60,
    "max_in_flight": 2,
}


def run(data: bytes) -> None:
    """Takes bytes as a file, or changes an entry by them, and asks for a header."""
    choices = Choices(data)
    is_made = choices.number(2)
    header = choices.one_of(["Bearer orc-key", "bearer  orc-key ", "Basic x", "Bearer", None])
    if header is None:
        header = choices.text()
    content = choices.bytes(4096)
    if is_made:
        made = Choices(content)
        entries = [made.changed(ENTRY) for _ in range(made.number(3))]
        content = json.dumps(made.changed({"keys": entries})).encode()
    file = Mock(spec=Path)
    file.read_bytes.return_value = content
    try:
        keys = ApiKeys(file, now=lambda: 0.0)
    except ValueError as error:
        assert hash_of("orc-key") not in str(error)  # the message repeats no content
        return
    with contextlib.suppress(errors.Unauthenticated, errors.PoolFull):
        keys.admit(header)


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\1"),
        *(bytes([0, header]) + json.dumps({"keys": [ENTRY]}).encode() for header in range(5)),
        bytes([1, 0, 1, 0, 3, 3]),
        bytes([1, 0, 2, 1, 1, 4, 4, 4]),
    ],
    words=[f'"{name}":' for name in ("keys", *ENTRY)],
)
