"""Classes that settings name: those of this project, and those of installed packages.

A package offers a class by an entry point (`importlib.metadata`) whose name is the name in the
settings. A class of a package is loaded only when a setting names it, since it then runs inside the
scheduler. Names of this project come first, so that no package can replace one.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """A class with the name by which settings find it."""

    name: str


Kind = TypeVar("Kind", bound=Named)


class Registry(Generic[Kind]):
    """The classes of one kind, by name. As a collection it has the names of this project's
    classes."""

    def __init__(
        self, kind: type[Kind], what: str, *, group: str, api: int, built_in: Sequence[type[Kind]]
    ) -> None:
        """`what` names the kind in messages. `group` is the entry point group of packages, and
        `api` the version of the contract for which their classes must be written."""
        self._kind = kind
        self._what = what
        self._group = group
        self._api = api
        self._built_in = {one.name: one for one in built_in}

    def __iter__(self) -> Iterator[str]:
        return iter(self._built_in)

    def __len__(self) -> int:
        return len(self._built_in)

    def __contains__(self, name: object) -> bool:
        return name in self._built_in

    def __getitem__(self, name: str) -> type[Kind]:
        """Returns the class with a name, and loads it if it is of an installed package.

        Raises:
            ValueError: there is no such class, or it does not follow the contract.
        """
        self.check(name)
        return self._built_in.get(name) or self._loaded(self._installed()[name])

    def check(self, name: str) -> str:
        """Returns a name for which there is a class. Loads nothing.

        Raises:
            ValueError: there is no such class. The message lists the known names.
        """
        if name in self._built_in:
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
        if getattr(loaded, "api", None) != self._api:
            raise ValueError(
                f"{where} is written for version {getattr(loaded, 'api', None)} of the contract, "
                f"and this is version {self._api}"
            )
        if loaded.name != point.name:
            raise ValueError(f"{where} calls itself {loaded.name!r}")
        return loaded
