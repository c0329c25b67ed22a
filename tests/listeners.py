"""The table of `docs/security.md`: the addresses on which each process listens, and the clients
that may connect."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
KERNEL_CHOOSES = "any"
KUBELET = "kubelet"


@dataclass(frozen=True, slots=True)
class Listener:
    """One port of one process."""

    process: str
    port: int | None
    """None where the kernel chooses it."""
    clients: frozenset[str]
    """Processes, the namespace `monitoring`, or `anyone`; a kubelet needs no rule."""
    without_mtls: str
    with_mtls: str

    @property
    def is_encrypted(self) -> bool:
        """Whether it speaks TLS with the component `mtls`."""
        return self.with_mtls.startswith(("TLS;", "mutual TLS;"))

    @property
    def wants_a_certificate(self) -> bool:
        """Whether it asks clients for a certificate with the component `mtls`."""
        return self.with_mtls.startswith("mutual TLS;")


def table() -> list[Listener]:
    """Returns the rows, one for each process that they name."""
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
    """The ports of a process; None among them where the kernel chooses some."""
    return {row.port for row in table() if row.process == process}
