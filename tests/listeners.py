"""Reads the table in `docs/security.md`: the addresses at which each process listens, and the
clients that may connect."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
KERNEL_CHOOSES = "any"
KUBELET = "kubelet"


@dataclass(frozen=True, slots=True)
class Listener:
    """A port at which a process listens."""

    process: str
    port: int | None
    """None if the kernel chooses the port."""
    clients: frozenset[str]
    """The clients that need a rule in a network policy: processes, the namespace `monitoring`, or
    `anyone`."""
    without_mtls: str
    with_mtls: str

    @property
    def is_encrypted(self) -> bool:
        """Whether the port uses TLS with the component `mtls`."""
        return self.with_mtls.startswith(("TLS;", "mutual TLS;"))

    @property
    def wants_a_certificate(self) -> bool:
        """Whether the port demands a certificate from clients with the component `mtls`."""
        return self.with_mtls.startswith("mutual TLS;")


def table() -> list[Listener]:
    """Returns the rows of the table. A row that names several processes becomes one listener for
    each."""
    header, *rest = cells_under("What listens where")
    columns = ["process", "port", "speaks", "who may connect", "without `mtls`", "with `mtls`"]
    assert header == columns
    return [
        Listener(
            process,
            None if port == KERNEL_CHOOSES else int(port),
            frozenset(re.split(", ", who.partition(";")[0])) - {KUBELET, "nobody"},
            without_mtls,
            with_mtls,
        )
        for processes, port, _, who, without_mtls, with_mtls in rest
        for process in processes.split(", ")
    ]


def cells_under(heading: str) -> list[list[str]]:
    """Returns the table below a heading of the page: its header, and its rows."""
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")
    lines = after.partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    header, _, *rest = ([cell.strip() for cell in row] for row in rows)
    return [header, *rest]


def ports_of(process: str) -> set[int | None]:
    """Returns the ports of a process. The set contains None if the kernel chooses a port."""
    return {row.port for row in table() if row.process == process}
