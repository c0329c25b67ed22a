"""Parses the metrics that a service exposes to Prometheus."""

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
        """Returns the samples that a registry exposes."""
        return cls(generate_latest(registry).decode())

    @property
    def names(self) -> set[str]:
        """Names of all samples. A histogram has samples with the endings `_bucket`, `_count` and
        `_sum`."""
        return {sample.name for sample in self._samples}

    def labels(self, name: str) -> list[dict[str, str]]:
        """Returns the labels of each sample with the name `name`."""
        return [sample.labels for sample in self._samples if sample.name == name]

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples with the name `name` and these labels, 0 if there are
        none. Raises AssertionError if there is no sample with the name."""
        assert name in self.names, f"no {name} among {sorted(self.names)}"
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
