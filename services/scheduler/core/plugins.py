"""Finds the classes that settings name, in this project and in installed packages.

A package offers a class by an entry point (`importlib.metadata`) whose name is the name in the
settings. A class of a package runs inside the scheduler, so it is loaded only when a setting names
it. Names of this project come first, so that no package can replace one.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Generic, Protocol, TypeVar


class Named(Protocol):
    """A class with the name by which settings find it."""

    name: ClassVar[str]


Kind = TypeVar("Kind", bound=Named)


class Registry(Generic[Kind]):
    """The classes of one kind, by name. Iteration, `len` and `in` see only the names of this
    project's classes."""

    def __init__(
        self, kind: type[Kind], what: str, *, group: str, api: int, built_in: Sequence[type[Kind]]
    ) -> None:
        """`what` is the word for the kind in messages, such as `policy`. `group` is the entry point
        group of packages, and `api` the version of the contract for which their classes must be
        written."""
        self._kind = kind
        self._what = what
        self._group = group
        self._api = api
        self._built_in = {one.name: one for one in built_in}
        self._offered: dict[str, type[Kind]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._built_in)

    def __len__(self) -> int:
        return len(self._built_in)

    def __contains__(self, name: object) -> bool:
        return name in self._built_in

    def __getitem__(self, name: str) -> type[Kind]:
        """Returns the class with the name `name`. Loads the class if an installed package offers
        it.

        Raises:
            ValueError: there is no such class, or it does not follow the contract.
        """
        self.check(name)
        known = self._built_in.get(name) or self._offered.get(name)
        return known or self._loaded(self._installed()[name])

    def offer(self, kind: type[Kind], where: str) -> None:
        """Makes a class known in this process. `where` names its origin in messages.

        Raises:
            ValueError: the class does not follow the contract, or its name is taken.
        """
        name = getattr(kind, "name", "")
        self._check_contract(kind, f"{self._what} {name!r} ({where})")
        if name in self._built_in:
            raise ValueError(f"{where}: the {self._what} {name!r} is one of this project")
        self._offered[name] = kind

    def check(self, name: str) -> str:
        """Returns `name` if there is a class with this name. Loads nothing.

        Raises:
            ValueError: there is no such class. The message lists the known names.
        """
        if name in self._built_in or name in self._offered:
            return name
        installed = self._installed()
        if name not in installed:
            of_packages = f", and of installed packages {', '.join(installed)}" if installed else ""
            raise ValueError(
                f"there is no {self._what} {name!r}; known are {', '.join(self._built_in)}"
                f"{of_packages}"
            )
        return name

    def _installed(self) -> dict[str, EntryPoint]:
        found = entry_points(group=self._group)
        return {point.name: point for point in sorted(found) if point.name not in self._built_in}

    def _loaded(self, point: EntryPoint) -> type[Kind]:
        where = f"{self._what} {point.name!r} ({point.value})"
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{where} cannot be loaded: {error}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, self._kind)):
            raise ValueError(f"{where} is no subclass of {self._kind.__name__}")
        self._check_contract(loaded, where)
        if loaded.name != point.name:
            raise ValueError(f"{where} calls itself {loaded.name!r}")
        return loaded

    def _check_contract(self, kind: type[Kind], where: str) -> None:
        """Raises ValueError if a class lacks a name, an abstract method or the right version."""
        missing = sorted(getattr(kind, "__abstractmethods__", ()))
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}")
        name = getattr(kind, "name", None)
        if not (isinstance(name, str) and name):
            raise ValueError(f"{where} has no name")
        api = getattr(kind, "api", None)
        if api is None:
            raise ValueError(f"{where} must have `api = {self._api}`, the version of the contract")
        if api != self._api:
            raise ValueError(
                f"{where} is written for version {api} of the contract, "
                f"and this is version {self._api}"
            )
