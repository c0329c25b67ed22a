"""Rules of a grammar that are added while the grammar is made, each once."""


class RuleSet:
    """Named rules of a grammar in Lark."""

    def __init__(self, prefix: str = "") -> None:
        """All names begin with `prefix`. Two sets of rules in one grammar need different
        prefixes."""
        self._prefix = prefix
        self._names: dict[tuple[str, str], str] = {}
        self._lines: list[str] = []
        self._n_names = 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The rules, one a line."""
        return tuple(self._lines)

    def new_name(self, kind: str) -> str:
        """Returns a name that no rule has."""
        self._n_names += 1
        prefix = self._prefix.upper() if kind.isupper() else self._prefix
        return f"{prefix}{kind}_{self._n_names}"

    def define(self, name: str, rule: str) -> None:
        """Adds a rule with a new name."""
        self._lines.append(f"{name}: {rule}")

    def add(self, kind: str, rule: str, attribute: str = "") -> str:
        """Adds a rule, unless an equal rule of this kind exists, and returns its name. The name
        begins with `kind`, which is in capitals for a terminal."""
        name = self._names.get((kind, rule))
        if name is None:
            name = self._names[kind, rule] = self.new_name(kind)
            self.define(f"{name}{attribute}", rule)
        return name
