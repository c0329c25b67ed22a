"""The metrics that a service exposes to Prometheus, for tests to look into."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    @classmethod
    def of(cls, registry: CollectorRegistry) -> "Samples":
        """Returns the exposition of a registry."""
        return cls(generate_latest(registry).decode())

    @property
    def names(self) -> set[str]:
        """Names of all samples; a histogram has `_bucket`, `_count` and `_sum`."""
        return {sample.name for sample in self._samples}

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each sample of that name."""
        return [sample.labels for sample in self._samples if sample.name == name]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name which have these labels, 0 if there are none."""
        assert name in self.names, f"no {name} among {sorted(self.names)}"
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
