"""The tools of a conversation, and the names under which the model sees them.

A client names a tool by a namespace and a name, or by a name alone. The model sees each tool under
one name, its shown name, which must be unique. Tools come in the field `tools` of the body and in
items of the conversation.
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
"""Type of a client's name for a tool: the namespace, or None, and the name in the namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool, with the path at which the body lists it."""

    path: str
    """Path of the tool in the body, such as `tools.0.tools.1`."""
    tool: NamedClientTool | SearchTool
    namespace: str | None = None
    note: str = ""
    """Paragraph that tells the model about the namespace. Only the first tool of a namespace has
    it."""
    is_found: bool = False
    """Whether a search has found the tool. The model sees such a tool even if the tool has
    `defer_loading`."""

    @property
    def key(self) -> Key:
        """The namespace and the name by which clients call the tool."""
        return self.namespace, self.tool.name


def listed(
    tools: Sequence[ResponsesTool] | None, field: str, *, is_found: bool = False
) -> Iterator[ListedTool]:
    """Yields the tools that the client runs, both from `tools` itself and from the namespaces in
    `tools`. `field` is the path of `tools` in the body."""
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
    """The tools that the model sees, and the names under which it sees them. If several tools have
    the same namespace and name, the last one replaces the others."""

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
        """Returns the tools in the form in which the model sees them, keyed by path in the body.
        Leaves out a tool if its name for the model is not in `among`."""
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
        """Returns the name under which the model sees a tool. `namespace` and `name` are the
        client's names for the tool; `namespace` may be None if only one namespace has a tool of
        this name. For a tool that is not in the table, returns the name that the table would give
        to the tool."""
        if (namespace, name) in self._names:
            return self._names[namespace, name]
        if namespace is not None:
            return _qualified(namespace, name)
        places = [key for key in self._names if key[1] == name]
        return self._names[places[0]] if len(places) == 1 else name

    def names_in(self, namespace: str) -> set[str]:
        """Returns the names under which the model sees the tools of a namespace."""
        return {name for key, name in self._names.items() if key[0] == namespace}

    def called(self, shown_name: str) -> tuple[Key, NamedClientTool | SearchTool | None]:
        """Returns the client's names for a tool, and the tool. `shown_name` is the name that the
        model has written in a call. If the model has invented the name, the namespace and the tool
        are None."""
        key = self._keys.get(shown_name)
        return ((None, shown_name), None) if key is None else (key, self._tools[key].tool)

    @property
    def names(self) -> set[str]:
        """Names under which the model sees the tools."""
        return set(self._keys)

    def is_shown(self, path: str, among: Collection[str]) -> bool:
        """Returns whether the model may call the tool at `path` in the body, or any tool of the
        namespace at `path`. `among` has the names, as the model sees them, of the tools that may be
        called."""
        return any(
            self._names[key] in among and f"{listed.path}.".startswith(f"{path}.")
            for key, listed in self._tools.items()
        )


def _is_deferred(listed: ListedTool) -> bool:
    return isinstance(listed.tool, NamedClientTool) and bool(listed.tool.defer_loading)


def _names(keys: Iterable[Key]) -> Iterator[tuple[Key, str]]:
    """Yields, for each tool, the client's name for the tool and the unique name under which the
    model sees the tool. For a tool without a namespace, the two names are equal."""
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
