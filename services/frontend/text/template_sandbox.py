"""Jinja with limits on the processor time and the characters of one rendering.

The sandbox of Jinja keeps a template from reaching into Python. The sandbox does not stop a
template that loops for ever or writes a billion spaces. The template comes with the checkpoint, but
its input comes from any client.

The time is checked wherever a template can repeat work: in loops, calls and filters. The length is
checked before each operation that can make a long text out of short texts. Between two checks a
template handles only texts of a bounded length, but no time is checked there: one search or sort
may take some hundredths of a second.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

COPIES = 4
"""Number of characters that a template may handle for each character of its largest output. The
number is above 1, because a text is built from parts, and a part is counted each time it is
handled."""

MAX_PRODUCT = 2**26
"""Largest number of characters that a function may write if it repeats one argument for each part
of another argument."""

MAX_NUMBER_BITS = 1024
"""Largest number of bits of an integer that an operation of a template may compute."""

LAZY_FILTERS = {
    *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last"),
    *("length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse"),
    *("select", "selectattr", "slice", "sort", "unique"),
}
"""Filters that do not turn their arguments into text. For any other filter, the lengths of the
arguments are checked."""

_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""Matches format strings with a large width, or with a width that an argument sets."""


class TooMuch(jinja2.TemplateRuntimeError):
    """Raised if a template would write too many characters, or compute too large a number."""


class TooSlow(TooMuch):
    """Raised if rendering a template has taken too much processor time."""


class Meter:
    """Counts the processor time and the characters of one rendering, and raises an error if one of
    them exceeds its limit."""

    def __init__(self, *, limit_s: float, max_characters: int) -> None:
        self.max_characters = max_characters
        self._n_left = COPIES * max_characters
        self._limit_s = limit_s
        self._ends_at = time.thread_time() + limit_s

    def look(self) -> None:
        """Raises TooSlow if the time limit is exceeded. Only processor time of this thread
        counts."""
        if time.thread_time() > self._ends_at:
            raise TooSlow(f"it takes longer than {self._limit_s:g} s")

    def write(self, n_characters: int) -> None:
        """Counts `n_characters` characters that the template handles. Raises TooMuch if they are
        too many at once or in total."""
        self._n_left -= n_characters
        if self._n_left < 0 or n_characters > self.max_characters:
            raise self.too_much()

    def size(self, value: object) -> int:
        """Returns the approximate number of characters of a value as text. Stops counting when the
        number exceeds the limit."""
        size, rest = 0, [value]
        while rest and size <= self.max_characters:
            size += 1
            match rest.pop():
                case str(text):
                    size += len(text)
                case Mapping() as mapping:
                    rest.extend(mapping.keys())
                    rest.extend(mapping.values())
                case list() | tuple() | set() | frozenset() | range() as values:
                    size += len(values)
                    if size <= self.max_characters:
                        rest.extend(values)
        return size

    def check(self, *arguments: object) -> None:
        """Raises TooMuch if a function with these arguments could write too many characters. The
        product of all lengths and numbers is limited, because some functions repeat an argument as
        many times as another argument says, or once for each part of another argument."""
        most = 1
        for argument in arguments:
            size = abs(argument) if isinstance(argument, int) else self.size(argument)
            most *= max(1, size)
            if size > self.max_characters or most > MAX_PRODUCT:
                raise self.too_much()

    def too_much(self) -> TooMuch:
        """Returns the error for a text that is too long."""
        return TooMuch(f"it writes more than {self.max_characters} characters")


_meter: ContextVar[Meter] = ContextVar("meter")


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Limits the time and the characters of templates that run in this thread inside the `with`
    block."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's environment for untrusted templates, which also limits the time and the characters of
    each rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_count_output, **options)
        for name, function in self.filters.items():
            self.filters[name] = _counted(function, is_lazy=name in LAZY_FILTERS)
        self.filters["_each"] = _each

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a filter with the name `name`, or replaces the filter of that name. Before the
        filter calls `function`, it checks the limits of the current rendering."""
        self.filters[name] = _counted(function, is_lazy=False)

    def read(self, source: str, variables: dict[str, Any]) -> jinja2.Template:
        """Compiles a template.

        Raises:
            TemplateError: the template is broken.
        """
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            n_written = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = _filtered(loop.iter, "_each", nodes.Const(n_written))
        for parent in list(tree.find_all(nodes.Node)):
            _replace_concatenations(parent)
        return self.from_string(tree, globals=variables)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        meter.look()
        _check_operation(meter, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.look()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps the `format` of a text
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
            values = (method.__self__, *args, *kwargs.values())
            if method.__name__ in ("format", "format_map"):
                _check_format(meter, *values)
            else:
                meter.check(*values)
        return super().call(__context, __obj, *args, **kwargs)


def _filtered(value: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


def _replace_concatenations(parent: nodes.Node) -> None:
    """Replaces each operator `~` (concatenation) directly below the node `parent` by the filter
    `join`, because the sandbox cannot intercept the operator."""
    for field, value in parent.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(parent, field, _joined(value))
        elif isinstance(value, list):
            value[:] = [_joined(one) if isinstance(one, nodes.Concat) else one for one in value]


def _joined(node: nodes.Concat) -> nodes.Expr:
    return _filtered(nodes.List(node.nodes, lineno=node.lineno), "join")


def _each(values: Iterable[Any], n_written: int) -> Iterator[Any]:
    """Yields the values over which a template loops. Before each value, checks the limits of the
    current rendering. `n_written` is the number of characters that the body of the loop writes each
    time."""
    meter = _meter.get()
    for value in values:
        meter.look()
        meter.write(n_written)
        yield value


def _count_output(value: Any) -> Any:
    meter = _meter.get(None)
    if meter is not None:  # it is None for constants, while a template is compiled
        meter.write(len(value) if isinstance(value, str) else meter.size(value))
    return value


def _counted(function: Callable[..., Any], *, is_lazy: bool) -> Callable[..., Any]:
    """Returns a filter that checks the limits of the current rendering (its `Meter`) before it
    calls `function`. When Jinja compiles a template, it tries to compute filters of constants in
    advance. There is no meter then, so the filter raises LookupError, and Jinja leaves it to the
    rendering. If `is_lazy`, only the time is checked, not the lengths of the arguments."""

    @wraps(function)  # the attributes say how Jinja must call the filter
    def counted(*args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.look()
        if not is_lazy:
            values = [value for value in args if not _is_jinjas(value)] + list(kwargs.values())
            if function is FILTERS["format"]:
                _check_format(meter, *values)
            else:
                meter.check(*values)
        return function(*args, **kwargs)

    return counted


def _is_jinjas(value: object) -> bool:
    return isinstance(value, Context | jinja2.Environment | nodes.EvalContext)


def _check_operation(meter: Meter, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            n_bits = left.bit_length() * abs(right)
        else:
            n_bits = left.bit_length() + right.bit_length()
        if n_bits > MAX_NUMBER_BITS:
            raise TooMuch("a number is too large")
    elif operator == "*":
        meter.check(left, right)
        meter.write(_length(left) * max(1, _length(right)))
    elif operator == "%":
        _check_format(meter, left, right)
    else:
        meter.write(_length(left) + _length(right))


def _length(value: object) -> int:
    """Returns the length of a text or list, or the value of a number."""
    if isinstance(value, int):
        return max(0, value)
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_format(meter: Meter, text: object, *values: object) -> None:
    """Counts the characters of a format string and its values. Raises TooMuch if they are too many,
    or if the format string could make a long text of short values."""
    if isinstance(text, str) and _WIDE.search(text):
        raise meter.too_much()
    meter.write(meter.size([text, *values]))
