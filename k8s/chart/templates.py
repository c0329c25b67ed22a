"""Writes trees of conditional parts as templates of Helm."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import yaml

from k8s.chart.conditional import Components, Listed, Mapped, Node, Part, Rule, Scalar
from k8s.chart.kustomize import NAMESPACE, PREFIX
from k8s.chart.places import OWN_IMAGES, Block, Expression
from k8s.chart.switches import SWITCHES

_IMAGE = re.compile(rf"{OWN_IMAGES}([a-z-]+):dev(-[a-z]+)?")
_NAMES = {
    PREFIX: '{{ include "orcinus.prefix" . }}',
    NAMESPACE: "{{ .Release.Namespace }}",
}
_DEEPER = 2


def document(part: Part) -> str:
    """Returns the template of one object."""
    return "\n".join(_all_guarded([part], lambda it: _lines(it.node, 0), 0)) + "\n"


def definition(name: str, node: Node) -> str:
    """Returns a named template of a part of an object."""
    body = "\n".join(_lines(node, 0))
    return f'{{{{- define "{name}" -}}}}\n{body}\n{{{{- end }}}}\n'


def _all_guarded(
    parts: Iterable[Part], lines_of: Callable[[Part], list[str]], indent: int
) -> list[str]:
    """Returns the lines of all parts, those that follow each other under one condition together."""
    lines: list[str] = []
    margin = " " * indent
    for condition, group in groupby(parts, lambda part: _when_true(part.is_there)):
        inner = [line for part in group for line in lines_of(part)]
        if condition != "true":
            inner = [f"{margin}{{{{- if {condition} }}}}", *inner, f"{margin}{{{{- end }}}}"]
        lines += inner
    return lines


def _lines(node: Node, indent: int) -> list[str]:
    match node:
        case Mapped(parts):
            # The first line is always there, where one is.
            ordered = sorted(parts, key=_place)
            return _all_guarded(ordered, lambda part: _field(part, indent), indent)
        case Listed(parts):
            return _all_guarded(parts, lambda part: _element(part, indent), indent)
        case Scalar():
            return [" " * indent + _scalar(node)]


def _place(part: Part) -> tuple[bool, str]:
    """Returns what fields are sorted by: those that are always there first, and blocks last."""
    condition = _when_true(part.is_there)
    return _block(part) is not None, "" if condition == "true" else condition


def _field(part: Part, indent: int) -> list[str]:
    if (block := _block(part)) is not None:
        return _block_lines(block, indent)
    key = " " * indent + _plain(part.key)
    match part.node:
        case Scalar():
            return [f"{key}: {_scalar(part.node, indent + _DEEPER)}"]
        case Mapped(parts) | Listed(parts):
            lines = [f"{key}:", *_lines(part.node, indent + _DEEPER)] if parts else []
            return _unless_empty(lines, parts, f"{key}: {_empty(part.node)}", " " * indent)


def _unless_empty(
    lines: Sequence[str], parts: Sequence[Part], empty: str, margin: str
) -> list[str]:
    """Returns the lines of a field with `parts`, or `empty` where it has none of them."""
    conditions = {_when_true(part.is_there): None for part in parts}
    if "true" in conditions:
        return list(lines)
    if not conditions:
        return [empty]
    one_of = " ".join(conditions) if len(conditions) == 1 else f"or {' '.join(conditions)}"
    return [
        f"{margin}{{{{- if {one_of} }}}}",
        *lines,
        f"{margin}{{{{- else }}}}",
        empty,
        f"{margin}{{{{- end }}}}",
    ]


def _empty(node: Mapped | Listed) -> str:
    return "{}" if isinstance(node, Mapped) else "[]"


def _element(part: Part, indent: int) -> list[str]:
    margin = " " * indent
    if (block := _block(part)) is not None:
        return _block_lines(block, indent)
    if isinstance(part.node, Scalar):
        return [f"{margin}- {_scalar(part.node, indent + _DEEPER)}"]
    if not part.node.parts:
        return [f"{margin}- {_empty(part.node)}"]
    lines = _lines(part.node, indent + _DEEPER)
    if lines[0].lstrip().startswith("{{-"):
        return [f"{margin}-", *lines]
    return [f"{margin}- {lines[0].lstrip()}", *lines[1:]]


def _block(part: Part) -> Block | None:
    match part.node:
        case Scalar([Rule(_, Block() as block)]):
            return block
        case _:
            return None


def _block_lines(block: Block, indent: int) -> list[str]:
    places = {"INDENT": str(indent), "DEEPER": str(indent + _DEEPER)}
    return [
        " " * indent + re.sub("INDENT|DEEPER", lambda found: places[found[0]], line)
        for line in block.lines
    ]


def _scalar(node: Scalar, indent: int = 0) -> str:
    """Returns the text of a scalar: that of the last rule that counts."""
    first, *others = node.rules
    if not others:
        return _text(first.value, indent)
    texts, word = [], "if"
    for rule in reversed(others):
        texts.append(f"{{{{ {word} {_condition(rule.components)} }}}}{_text(rule.value)}")
        word = "else if"
    return "".join([*texts, "{{ else }}", _text(first.value), "{{ end }}"])


def _text(value: Any, indent: int | None = None) -> str:
    if isinstance(value, Expression):
        return f"{{{{ {value.text} }}}}"
    if isinstance(value, str):
        if image := _IMAGE.fullmatch(value):
            name, suffix = image[1], image[2] or ""
            return f'{{{{ include "orcinus.image" (list . "{name}" "{suffix}") }}}}'
        if "\n" in value and indent is not None:
            return _long_text(value, indent)
        return _with_names(_plain(value))
    return _plain(value)


def _long_text(value: str, indent: int) -> str:
    """Returns a text of several lines, as a literal block of YAML."""
    head = "|" if value.endswith("\n") else "|-"
    margin = " " * indent
    lines = [margin + line if line else "" for line in _escaped(value).rstrip("\n").split("\n")]
    return "\n".join([head, *lines])


def _plain(value: Any) -> str:
    """Returns a scalar in YAML, in one line, with no action of a template in it."""
    if isinstance(value, str) and "\n" in value:
        return _escaped(json.dumps(value, ensure_ascii=False))
    text: str = yaml.safe_dump(value, width=100_000, allow_unicode=True)
    return _escaped(text.removesuffix("...\n").strip())


def _escaped(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


def _with_names(text: str) -> str:
    if text == NAMESPACE:
        return "{{ .Release.Namespace | quote }}"
    for probe, expression in _NAMES.items():
        text = text.replace(probe, expression)
    return text


def _condition(components: Components) -> str:
    """Returns the condition that all of some components are used."""
    implied = frozenset[str]().union(*(SWITCHES[name].needs for name in components))
    conditions = [SWITCHES[name].condition for name in SWITCHES if name in components - implied]
    return conditions[0] if len(conditions) == 1 else f"(and {' '.join(conditions)})"


def _when_true(rules: Sequence[Rule]) -> str:
    """Returns the condition that rules on true and false say true; "true" if they always do."""
    text = "true" if rules[0].value else "false"
    for rule in rules[1:]:
        if rule.value:
            text = _either(_condition(rule.components), text)
        else:
            text = _both(f"(not {_condition(rule.components)})", text)
    return text


def _either(condition: str, text: str) -> str:
    if text == "false":
        return condition
    if text.startswith("(or "):
        return f"{text[:-1]} {condition})"
    return f"(or {text} {condition})"


def _both(condition: str, text: str) -> str:
    return condition if text == "true" else f"(and {text} {condition})"
