"""Everything that attackers do, by the name under which it is ordered."""

from tests.hostile.attack import Attack
from tests.hostile.attacks import (
    bodies,
    connections,
    grammars,
    heads,
    http2,
    http_rules,
    internals,
    monopoly,
    readers,
    texts,
)

MODULES = (
    texts,
    heads,
    connections,
    grammars,
    readers,
    bodies,
    monopoly,
    http_rules,
    http2,
    internals,
)

ATTACKS: dict[str, Attack] = {attack.name: attack for part in MODULES for attack in part.ATTACKS}
