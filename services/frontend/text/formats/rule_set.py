"""Collects the rules of a grammar while the grammar is made, and adds each rule only once."""


class RuleSet:
    """Collects the named rules of one Lark grammar."""

    def __init__(self, prefix: str = "") -> None:
        """All names begin with `prefix`. If one grammar has two sets of rules, each needs a prefix
        of its own."""
        self._prefix = prefix
        self._names: dict[tuple[str, str], str] = {}
        self._lines: list[str] = []
        self._n_names = 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The rules in Lark, one rule per line."""
        return tuple(self._lines)

    def new_name(self, kind: str) -> str:
        """Returns a name that no rule of the set has yet."""
        self._n_names += 1
        prefix = self._prefix.upper() if kind.isupper() else self._prefix
        return f"{prefix}{kind}_{self._n_names}"

    def define(self, name: str, rule: str) -> None:
        """Adds the rule `rule` with the name `name`, which no other rule of the set may have."""
        self._lines.append(f"{name}: {rule}")

    def add(self, kind: str, rule: str, attribute: str = "") -> str:
        """Adds a rule to the set, unless the set has an equal rule of this kind, and returns the
        rule's name. The name consists of the prefix, `kind` and a number. If the rule is a
        terminal, `kind` must be in capitals. `attribute`, such as `[lazy]`, is written after the
        name in the rule."""
        name = self._names.get((kind, rule))
        if name is None:
            name = self._names[kind, rule] = self.new_name(kind)
            self.define(f"{name}{attribute}", rule)
        return name
