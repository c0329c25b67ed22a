"""Trees whose parts depend on which components are used, made of renderings with some of them.

A rendering is a value of mappings, lists and scalars, and belongs to a set of components. `combine`
returns one tree for all renderings. Each of its parts has rules: a rule is a set of components and
what the part is with them, and of the rules whose components are all used, the last one counts.
Renderings are combined in their order, so that of two components that change the same part, the
later one wins, as it does in kustomize; what two change together otherwise must be rendered, too.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Components = frozenset[str]
Rendering = tuple[Components, Any]

ABSENT = object()
"""The value of a part in a rendering that lacks the part."""

KEYS = ("name", "mountPath", "key")
"""Fields by which elements of a list are the same element in two renderings."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The value that a part of the chart has if all `components` are used. If several rules of a
    part apply, the last of them counts."""

    components: Components
    value: Any


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number, a text or another value that is not divided further. The components of its first
    rule are empty, so one rule always applies."""

    rules: Sequence[Rule]


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a mapping or an element of a list, and the rules on whether it is there."""

    key: Hashable
    is_there: Sequence[Rule]
    node: "Node"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapping; `key` of its parts is the field."""

    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Listed:
    """A list; `key` of its parts tells elements apart, and is not a part of the value."""

    parts: Sequence[Part]


Node = Scalar | Mapped | Listed


def combine(renderings: Sequence[Rendering]) -> Node:
    """Returns one tree for `renderings`, of which the first has the fewest components."""
    shared = frozenset[str].intersection(*(components for components, _ in renderings))
    # What all renderings of a part have in common is a condition on the part as a whole.
    below = [(components - shared, value) for components, value in renderings]
    values = [value for _, value in below]
    if all(isinstance(value, dict) for value in values):
        return Mapped(_parts(below, lambda value: value))
    if all(isinstance(value, list) for value in values):
        return Listed(_parts(below, _by_key))
    return Scalar(rules_of(below))


def rules_of(renderings: Sequence[Rendering]) -> list[Rule]:
    """Returns rules from which the value of each rendering follows."""
    rules: list[Rule] = []
    for components, value in renderings:
        if not rules or not _is_same(value_of(rules, components), value):
            rules.append(Rule(components, value))
    return rules


def value_of(rules: Sequence[Rule], used: Components) -> Any:
    """Returns what a part is with the components in `used`."""
    return next((rule.value for rule in reversed(rules) if rule.components <= used), rules[0].value)


def resolve(node: Node, used: Components) -> Any:
    """Returns the value of a tree with the components in `used`."""
    match node:
        case Scalar(rules):
            return value_of(rules, used)
        case Mapped(parts):
            there = [part for part in parts if value_of(part.is_there, used)]
            return {part.key: resolve(part.node, used) for part in there}
        case Listed(parts):
            return [resolve(part.node, used) for part in parts if value_of(part.is_there, used)]


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _parts(
    renderings: Sequence[Rendering], fields_of: Callable[[Any], Mapping[Hashable, Any]]
) -> list[Part]:
    fields = [(components, fields_of(value)) for components, value in renderings]
    return [_part(key, fields) for key in _order([list(these) for _, these in fields])]


def _part(key: Hashable, fields: Sequence[tuple[Components, Mapping[Hashable, Any]]]) -> Part:
    is_there = rules_of([(components, key in these) for components, these in fields])
    having = [(components, these[key]) for components, these in fields if key in these]
    return Part(key, is_there, combine(having))


def _order(orders: Sequence[Sequence[Hashable]]) -> list[Hashable]:
    """Returns all keys, where possible in the order that each of `orders` has."""
    merged: list[Hashable] = []
    for order in orders:
        place = 0
        for key in order:
            if key in merged:
                place = merged.index(key) + 1
            else:
                merged.insert(place, key)
                place += 1
    return merged


def _by_key(elements: Sequence[Any]) -> dict[Hashable, Any]:
    for field in KEYS:
        if all(isinstance(it, dict) and field in it for it in elements if not _is_alone(it)):
            keys = [it if _is_alone(it) else it[field] for it in elements]
            if len(set(keys)) == len(keys):
                return dict(zip(keys, elements, strict=True))
    if all(map(_is_alone, elements)) and len(set(elements)) == len(elements):
        return {element: element for element in elements}
    return dict(enumerate(elements))


def _is_alone(element: Any) -> bool:
    """Returns whether an element is its own key."""
    return not isinstance(element, (dict, list))
