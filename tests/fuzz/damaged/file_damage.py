"""Damage to whole files, and to files of JSON.

A damage takes the files, which it changes, and dice, which decide everything. It returns None if
the checkpoint has nothing of the kind that it damages.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.damaged.originals import Files

Damage = Callable[[Files, Random], str | None]

INDEX = "model.safetensors.index.json"
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 1.5, -0.5, 1e308, 2**31, 2**63, 2**64, -(2**63), 10**30,
    float("nan"), float("inf"), "", "1", "0", "true", "null", "abc", "\0", "é" * 50, [], {}, [1],
    [None], [[]], {"a": 1}, [1, 2, 3], {"": {}},
)  # fmt: skip
"""Values of JSON that no field of a checkpoint should have."""


def cut(files: Files, dice: Random) -> str:
    """Cuts a file off."""
    name = dice.choice(sorted(files))
    content = files[name]
    at = dice.choice([0, len(content) - 1, len(content) // 2, dice.randrange(len(content) + 1), 9])
    files[name] = content[:at]
    return f"{name} is cut at {at}"


def lose(files: Files, dice: Random) -> str:
    """Removes a file."""
    name = dice.choice(sorted(files))
    del files[name]
    return f"{name} is missing"


def swap_files(files: Files, dice: Random) -> str | None:
    """Exchanges two files."""
    if len(files) < 2:
        return None
    one, other = dice.sample(sorted(files), 2)
    files[one], files[other] = files[other], files[one]
    return f"{one} and {other} are swapped"


def add_bytes(files: Files, dice: Random) -> str:
    """Puts bytes behind or in front of a file."""
    name = dice.choice(sorted(files))
    more = dice.choice([b"\0", b"{}", b" ", b"\xef\xbb\xbf", dice.randbytes(100)])
    at_end = dice.random() < 0.5
    files[name] = files[name] + more if at_end else more + files[name]
    return f"{more[:8]!r} {'behind' if at_end else 'in front of'} {name}"


def flip(files: Files, dice: Random) -> str:
    """Changes bytes anywhere, most often near the beginning."""
    name = dice.choice(sorted(files))
    content = bytearray(files[name])
    n_bytes = dice.choice([1, 1, 2, 16])
    at = dice.randrange(dice.choice([min(64, len(content)), min(4096, len(content)), len(content)]))
    content[at : at + n_bytes] = dice.randbytes(n_bytes)
    files[name] = bytes(content[: len(files[name])])
    return f"{n_bytes} bytes of {name} at {at}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key in list(value)[:60]:
            found += _places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 4)):
            found += _places(value[i], (*path, i))
    return found


def json_of(name: str) -> Damage:
    """Returns the damage that changes one value in a file of JSON."""

    def change(files: Files, dice: Random) -> str | None:
        if name not in files:
            return None
        content = json.loads(files[name])
        path = dice.choice(_places(content))
        how = dice.choice(["odd", "odd", "odd", "gone", "same kind", "text", "list", "twice"])
        changed = _changed(content, path, how, dice)
        files[name] = json.dumps(changed).encode()
        return f"{name}: {'.'.join(map(str, path))} {how}"

    return change


def _changed(content: Any, path: tuple[Any, ...], how: str, dice: Random) -> Any:
    if not path:
        return dice.choice([[], [content], None, {}, {"config": content}])
    *way, last = path
    inside = content
    for key in way:
        inside = inside[key]
    value = inside[last]
    if how == "gone":
        del inside[last]
    elif how == "text":
        inside[last] = str(value)
    elif how == "list":
        inside[last] = [value]
    elif how == "twice" and isinstance(inside, list):
        inside.append(value)
    elif how == "same kind" and isinstance(value, (int, float)) and not isinstance(value, bool):
        inside[last] = dice.choice([value + 1, value * 2, -value, value // 2, float(value)])
    else:
        inside[last] = dice.choice(ODD)
    return content


def exchange_values(files: Files, dice: Random) -> str | None:
    """Exchanges two values of config.json."""
    if "config.json" not in files:
        return None
    config = json.loads(files["config.json"])
    one, other = dice.sample(sorted(config), 2)
    config[one], config[other] = config[other], config[one]
    files["config.json"] = json.dumps(config).encode()
    return f"config.json: {one} and {other} are swapped"


def wrong_index(files: Files, dice: Random) -> str | None:
    """Sends a tensor, or all of a file, to another file."""
    if INDEX not in files:
        return None
    index = json.loads(files[INDEX])
    names = index["weight_map"]
    shards = sorted(set(names.values()))
    tensor = dice.choice(sorted(names))
    to = dice.choice([*shards, "missing.safetensors", "../a.safetensors", "config.json", 7, None])
    if dice.random() < 0.5:
        moved = [name for name in names if names[name] == names[tensor]]
    else:
        moved = [tensor]
    for name in moved:
        names[name] = to
    files[INDEX] = json.dumps(index).encode()
    return f"{INDEX}: {len(moved)} such as {tensor} in {to}"
