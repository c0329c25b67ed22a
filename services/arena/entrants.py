"""The policies that are compared. Each entrant is a policy together with an order, given by name or
by a file."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.arena.raised import described
from services.scheduler.core.order.order import Order
from services.scheduler.core.order.registry import ORDERS
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.registry import POLICIES

DEFAULT_POLICY, DEFAULT_ORDER = "chunked", "fcfs"
GALLERY = (
    "chunked",
    "orca",
    "sarathi",
    "fair",
    "shortest",
    "aging",
    "request_level",
    "batchmaker",
    "faster_transformer",
)
"""Names of the entrants that this project defines. `fair` is an order; its entrant has the policy
`chunked`."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy, and the order in which waiting requests are admitted, by their names in the
    settings."""

    policy: str
    order: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Returns the entrant that a text names: `POLICY`, `ORDER` or `POLICY/ORDER`.

        Raises:
            ValueError: there is no such policy or order.
        """
        first, slash, second = text.partition("/")
        if slash:
            return cls(POLICIES.check(first), ORDERS.check(second))
        try:
            return cls(POLICIES.check(first), DEFAULT_ORDER)
        except ValueError as no_policy:
            try:
                return cls(DEFAULT_POLICY, ORDERS.check(first))
            except ValueError as no_order:
                raise ValueError(f"{no_policy}; {no_order}") from no_order

    @property
    def name(self) -> str:
        """Name of the entrant as shown to users: `policy/order`. The default order is left out.
        With another order, the default policy is left out."""
        if self.order == DEFAULT_ORDER:
            return self.policy
        return self.order if self.policy == DEFAULT_POLICY else f"{self.policy}/{self.order}"


def load_file(path: Path) -> str:
    """Loads a Python file that defines one policy or one order. Returns the name of that policy or
    order. From then on, this process knows the name, as it knows the names of the project's own
    policies.

    Raises:
        ValueError: the file cannot be loaded, does not define exactly one policy or order, or
            defines one whose name is taken.
    """
    module_name = f"orcinus_arena_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a policy may raise anything
        raise ValueError(f"{path} cannot be loaded: {described(error)}") from error
    found = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, Policy | Order)
        and one.__module__ == module_name
    ]
    if len(found) != 1:
        names = ", ".join(one.__name__ for one in found) or "none"
        raise ValueError(f"{path} must define one policy or order, and defines {names}")
    kind = found[0]
    if issubclass(kind, Policy):
        POLICIES.offer(kind, str(path))
    else:
        ORDERS.offer(kind, str(path))
    return kind.name


def parse(texts: list[str]) -> tuple[list[Entrant], list[Path]]:
    """Returns the entrants that `texts` name, and the paths of the files that were loaded for them.
    In a text, each name may be replaced by a file that ends with `.py` and defines the policy or
    the order.

    Raises:
        ValueError: a text names no policy or order, or two files define the same name.
    """
    loaded: dict[Path, str] = {}
    entrants = []
    for text in texts:
        parts = _parts(text)
        for index, part in enumerate(parts):
            if part.endswith(".py"):
                file = Path(part).resolve()
                parts[index] = loaded[file] if file in loaded else load_file(file)
                known = {name: path for path, name in loaded.items() if path != file}
                if parts[index] in known:
                    raise ValueError(f"{known[parts[index]]} and {file} define {parts[index]!r}")
                loaded[file] = parts[index]
        entrants.append(Entrant.of("/".join(parts)))
    return list(dict.fromkeys(entrants)), list(loaded)


def _parts(text: str) -> list[str]:
    """Divides a text into the names or files of a policy, of an order, or of both. The names of
    files may contain slashes. A text that ends with `.py` names a single file, unless it begins
    with the name of a policy and a slash."""
    file, end, tail = text.partition(".py/")
    if end:
        return [f"{file}.py", tail]
    head, slash, tail = text.partition("/")
    is_file = text.endswith(".py") and (Path(text).is_file() or head not in POLICIES)
    return [head, tail] if slash and not is_file else [text]
