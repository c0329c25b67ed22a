from typing import NamedTuple

from services.common.named_tuples import maker


class Point(NamedTuple):
    """A named tuple with a default and a property."""

    x: int
    y: int = 0

    @property
    def total(self) -> int:
        return self.x + self.y


def test_what_is_made_is_as_if_its_class_had_made_it() -> None:
    made = maker(Point)((1, 2))
    assert type(made) is Point
    assert made == Point(1, 2)
    assert (made.x, made.y, made.total) == (1, 2, 3)
