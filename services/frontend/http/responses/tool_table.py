"""The tools of a conversation by the names that the model sees.

A client names a tool by a namespace and a name, or by a name alone. The model knows only one name
of a tool, which must be unique. Tools come in the field `tools` of the body and in items of the
conversation.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.frontend.http.protocol.conversation_tools import ClientTool
from services.frontend.http.responses.tools import (
    SEARCH,
    NamedClientTool,
    Namespace,
    ResponsesTool,
    SearchTool,
)

Key = tuple[str | None, str]
"""A namespace, or None, and the name of a tool in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool at its place in the body."""

    path: str
    """Path of the tool in the body, such as `tools.0.tools.1`."""
    tool: NamedClientTool | SearchTool
    namespace: str | None = None
    note: str = ""
    """Paragraph for the model about the namespace; only for the first tool of a namespace."""
    is_found: bool = False
    """Whether a search has found the tool, so that the model sees the tool in any case."""

    @property
    def key(self) -> Key:
        """The names by which clients call the tool."""
        return self.namespace, self.tool.name


def listed(
    tools: Sequence[ResponsesTool] | None, field: str, *, is_found: bool = False
) -> Iterator[ListedTool]:
    """Yields the tools of a list that the client runs. `field` is the path of the list."""
    for place, tool in enumerate(tools or ()):
        path = f"{field}.{place}"
        if isinstance(tool, Namespace):
            note = tool.note()
            for number, member in enumerate(tool.tools):
                if isinstance(member, NamedClientTool):
                    yield ListedTool(
                        path=f"{path}.tools.{number}",
                        tool=member,
                        namespace=tool.name,
                        note=note,
                        is_found=is_found,
                    )
                    note = ""
        elif isinstance(tool, NamedClientTool | SearchTool):
            yield ListedTool(path=path, tool=tool, is_found=is_found)


class ToolTable:
    """The tools that the model sees, with their names. Of several tools with one namespace and
    name, the last is taken."""

    def __init__(self, tools: Iterable[ListedTool]) -> None:
        by_key: dict[Key, ListedTool] = {}
        found: set[Key] = set()
        for tool in tools:
            by_key[tool.key] = tool
            if tool.is_found:
                found.add(tool.key)
        has_search = (None, SEARCH) in by_key and isinstance(by_key[None, SEARCH].tool, SearchTool)
        self._tools = {
            key: tool
            for key, tool in by_key.items()
            if not (has_search and _is_deferred(tool) and key not in found)
        }
        self._names = dict(_names(self._tools))
        self._keys = {name: key for key, name in self._names.items()}

    def shown(self, among: Collection[str]) -> dict[str, ClientTool]:
        """Returns the tools for the model, keyed by their path in the body. Only tools whose names
        for the model are in `among` are returned."""
        return {
            listed.path: (
                listed.tool.shown_as(self._names[key], note=listed.note)
                if isinstance(listed.tool, NamedClientTool)
                else listed.tool
            )
            for key, listed in self._tools.items()
            if self._names[key] in among
        }

    def name_of(self, namespace: str | None, name: str) -> str:
        """Returns the model's name of a tool that a client names. The namespace of a tool may be
        left out if only one namespace has the name. A tool that is not in the table gets the name
        that it would have in the table."""
        if (namespace, name) in self._names:
            return self._names[namespace, name]
        if namespace is not None:
            return _qualified(namespace, name)
        places = [key for key in self._names if key[1] == name]
        return self._names[places[0]] if len(places) == 1 else name

    def names_in(self, namespace: str) -> set[str]:
        """Returns the model's names of the tools in a namespace."""
        return {name for key, name in self._names.items() if key[0] == namespace}

    def called(self, shown_name: str) -> tuple[Key, NamedClientTool | SearchTool | None]:
        """Returns the client's names of a tool, and the tool, for the model's name. The tool is
        None if the model has invented the name."""
        key = self._keys.get(shown_name)
        return ((None, shown_name), None) if key is None else (key, self._tools[key].tool)

    @property
    def names(self) -> set[str]:
        """The model's names of all tools."""
        return set(self._keys)

    def is_shown(self, path: str, among: Collection[str]) -> bool:
        """Returns whether a tool of the body may be called, or any tool of a namespace. `among` has
        the model's names of the tools that may be called."""
        return any(
            self._names[key] in among and f"{listed.path}.".startswith(f"{path}.")
            for key, listed in self._tools.items()
        )


def _is_deferred(listed: ListedTool) -> bool:
    return isinstance(listed.tool, NamedClientTool) and bool(listed.tool.defer_loading)


def _names(keys: Iterable[Key]) -> Iterator[tuple[Key, str]]:
    """Yields each key with a name that no other key has. Keys without a namespace keep their
    names."""
    keys = list(keys)
    taken = {name for namespace, name in keys if namespace is None}
    counts = Counter(name for _, name in keys)
    yield from (((None, name), name) for name in taken)
    for namespace, name in keys:
        if namespace is None:
            continue
        shown = name if counts[name] == 1 else _qualified(namespace, name)
        while shown in taken:
            shown += "_"
        taken.add(shown)
        yield (namespace, name), shown


def _qualified(namespace: str, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}"
