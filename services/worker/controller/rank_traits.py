"""The traits of a worker: the properties that must be equal on all stages of a pipeline.

Each rank reports its traits before it loads weights, so that a leader assigns stages only to
workers that fit together.
"""

from collections.abc import Callable, Mapping

from orcinus.v1 import worker_pb2


class RankTraits:
    """Collects the traits that the ranks of a worker report, and compares them."""

    def __init__(
        self,
        tp_size: int,
        *,
        on_difference: Callable[[str], None],
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_difference` is called with the reason if two ranks of the worker report different
        traits. Such a worker cannot serve a stage. `on_complete` is called when all ranks have
        reported equal traits."""
        self._on_difference = on_difference
        self._on_complete = on_complete
        self._tp_size = tp_size
        self._told: dict[int, dict[str, str]] = {}  # by tp_rank

    def note(self, tp_rank: int, payload: bytes) -> None:
        """Records the traits of a rank. `payload` is the rank's message (`MessageKind.TRAITS`)."""
        traits = dict(worker_pb2.DescribeResponse.FromString(payload).traits)
        for other, its_traits in self._told.items():
            for name in sorted(traits.keys() | its_traits.keys()):
                mine, its = traits.get(name, ""), its_traits.get(name, "")
                if mine != its:
                    self._on_difference(
                        f"ranks {other} and {tp_rank} do not fit: {name} is {its} and {mine}"
                    )
                    return
        self._told[tp_rank] = traits
        if len(self._told) == self._tp_size:
            self._on_complete()

    @property
    def all(self) -> Mapping[str, str]:
        """The traits of the worker. The mapping is empty until all ranks have reported their
        traits."""
        return self._told[0] if len(self._told) == self._tp_size else {}
