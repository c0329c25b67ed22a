"""Damage to GGUF files, which stay readable as far as they do not lie."""

import struct
from collections.abc import Callable
from random import Random

from tests.fuzz.damaged.file_damage import Damage
from tests.fuzz.damaged.gguf_layout import GgufLayout, Value, text
from tests.fuzz.damaged.originals import Files


def of_gguf(change: Callable[[GgufLayout, Random], str | None]) -> Damage:
    def damage(files: Files, dice: Random) -> str | None:
        names = sorted(name for name in files if name.endswith(".gguf"))
        if not names:
            return None
        name = dice.choice(names)
        layout = GgufLayout.of(files[name])
        if len(layout.values) < 2 or len(layout.places) < 2:
            return None
        said = change(layout, dice)
        files[name] = layout.to_bytes()
        return said and f"{name}: {said}"

    return damage


def _odd_value(dice: Random) -> tuple[int, bytes]:
    return dice.choice([
        (4, struct.pack("<I", 0)), (4, struct.pack("<I", 1)), (4, struct.pack("<I", 2**32 - 1)),
        (5, struct.pack("<i", -1)), (10, struct.pack("<Q", 2**63)), (11, struct.pack("<q", -2)),
        (6, struct.pack("<f", float("nan"))), (6, struct.pack("<f", float("inf"))),
        (6, struct.pack("<f", -1.0)), (12, struct.pack("<d", 3.5)), (7, b"\1"), (7, b"\7"),
        (8, text("")), (8, text("abc")), (8, text("3")), (9, struct.pack("<IQ", 4, 0)),
        (9, struct.pack("<IQI", 4, 1, 3)), (9, struct.pack("<IQ", 8, 0)),
        (9, struct.pack("<IQ", 4, 2**62)), (9, struct.pack("<IQIQ", 9, 1, 4, 0)), (13, b""),
        (9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
    ])  # fmt: skip


def change_value(layout: GgufLayout, dice: Random) -> str:
    value = dice.choice(layout.values)
    value.kind, value.content = _odd_value(dice)
    return f"{value.key} is {value.content[:20]!r} of type {value.kind}"


def lose_value(layout: GgufLayout, dice: Random) -> str:
    return f"{layout.values.pop(dice.randrange(len(layout.values))).key} is missing"


def repeat_value(layout: GgufLayout, dice: Random) -> str:
    value = dice.choice(layout.values)
    kind, content = dice.choice([(value.kind, value.content), _odd_value(dice)])
    layout.values.append(Value(value.key, kind, content))
    return f"{value.key} is there twice"


def swap_values(layout: GgufLayout, dice: Random) -> str:
    one, other = dice.sample(layout.values, 2)
    one.key, other.key = other.key, one.key
    return f"{one.key} and {other.key} are swapped"


def lying_place(layout: GgufLayout, dice: Random) -> str:
    place, other = dice.sample(layout.places, 2)
    kind = dice.randrange(10)
    before = f"{place.name} {place.shape} {place.kind} {place.offset}"
    if kind == 0:
        place.offset = dice.choice([2**63, 2**64 - 32, len(layout.data), place.offset + 1])
    elif kind == 1:
        place.offset = other.offset
    elif kind == 2:
        place.offset, other.offset = other.offset, place.offset
    elif kind == 3:
        place.shape = dice.choice([place.shape[::-1], [*place.shape, 1], [1, *place.shape]])
    elif kind == 4:
        place.shape = dice.choice([[], [0], [-1], [2**62, 4], [2**32, 2**32], [1] * 5])
    elif kind == 5:
        place.kind = dice.choice([0, 1, 2, 8, 12, 14, 30, 4, 99, 2**32 - 1])
    elif kind == 6:
        place.name = dice.choice([other.name, "", f"{place.name}.old", place.name[1:]])
    elif kind == 7:
        layout.places.remove(place)
    elif kind == 8:
        place.name, other.name = other.name, place.name
    else:
        layout.places.append(place)
    return f"{before} is {place}, way {kind}"


def lying_count(layout: GgufLayout, dice: Random) -> str:
    n = dice.choice([0, 1, 2**63, 2**64 - 1, 10**6])
    if dice.random() < 0.3:
        layout.version = dice.choice([0, 1, 2, 4, 3 << 24])
        return f"version {layout.version}"
    if dice.random() < 0.5:
        layout.n_values = dice.choice([n, len(layout.values) - 1, len(layout.values) + 1])
        return f"{layout.n_values} values"
    layout.n_places = dice.choice([n, len(layout.places) - 1, len(layout.places) + 1])
    return f"{layout.n_places} tensors"


def lying_data(layout: GgufLayout, dice: Random) -> str:
    n = len(layout.data)
    layout.data = dice.choice([layout.data[:-1], layout.data[: n // 2], b"", layout.data[32:]])
    return f"{len(layout.data)} bytes of tensors instead of {n}"
