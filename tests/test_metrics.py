"""The metrics of all services: what is written of them, what asks for them, what they may say."""

import math
import re
from pathlib import Path

import pytest

from services.common import semconv
from tests.exposition import Samples
from tests.registries import registries

PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
OURS = ("orcinus_", "gen_ai_")


async def metrics_of(service: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels of each metric of ours, by its name as the code and the page have it."""
    registry = (await registries())[service]
    found = {}
    for family in registry.collect():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        if name.startswith(OURS):
            labels = {key for sample in family.samples for key in sample.labels} - {"le"}
            found[name] = (family.type, tuple(sorted(labels)))
    return found


def documented(service: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns kind and labels of each metric in the page's tables, by its name."""
    section = PAGE.partition(f"## {service.capitalize()}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\| \S[^|]* \|$", section, flags=re.M)
    return {
        name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows
    }


@pytest.mark.parametrize("service", ["frontend", "scheduler", "worker"])
async def test_the_page_has_every_metric_with_its_kind_and_labels(service: str) -> None:
    assert documented(service) == await metrics_of(service)


async def test_every_name_is_in_one_file() -> None:
    in_code = {name for service in await registries() for name in await metrics_of(service)}
    names = {value for value in vars(semconv).values() if isinstance(value, str)}
    in_file = {name for name in names if name.startswith(OURS)}
    assert in_code == in_file


async def test_units_are_base_units() -> None:
    for service in await registries():
        for name, (kind, _) in (await metrics_of(service)).items():
            assert not re.search(r"_(ms|ns|milliseconds|kib|mib|percent)(_|$)", name)
            assert name.endswith("_total") == (kind == "counter")


LARGEST = {
    "gen_ai_server_request_duration_seconds": (1200, 14),
    "gen_ai_server_time_to_first_token_seconds": (1200, 16),
    "gen_ai_server_time_per_output_token_seconds": (1200, 13),
    "orcinus_request_queue_seconds": (1200, 14),
    "orcinus_iteration_seconds": (1200, 13),
    "orcinus_iteration_overhead_seconds": (1200, 13),
    "orcinus_stage_compute_seconds": (1200, 13),
    "orcinus_stage_receive_seconds": (1200, 13),
    "orcinus_stage_send_seconds": (1200, 13),
    "orcinus_request_prompt_tokens": (2**20, 13),
    "orcinus_request_generation_tokens": (2**20, 13),
    "orcinus_iteration_batch_tokens": (2**20, 13),
    "orcinus_iteration_batch_size": (4096, 10),
}
"""The largest value that a quantile of each histogram can be, and the number of its buckets without
the infinite one: each bucket is a series."""


async def test_buckets_reach_as_far_as_values_can_be() -> None:
    bounds: dict[str, set[float]] = {}
    for registry in (await registries()).values():
        for family in registry.collect():
            if family.type == "histogram" and family.name.startswith(OURS):
                ends = {float(it.labels["le"]) for it in family.samples if "le" in it.labels}
                bounds[family.name] = ends - {math.inf}
    assert {name: (max(ends), len(ends)) for name, ends in bounds.items()} == LARGEST


async def test_no_label_names_a_request() -> None:
    for service in await registries():
        for _, labels in (await metrics_of(service)).values():
            assert not {"request_id", "id", "key", "user", "trace_id"} & set(labels)


async def test_every_service_tells_of_its_process() -> None:
    for registry in (await registries()).values():
        names = Samples.of(registry).names
        assert {"process_resident_memory_bytes", "python_gc_collections_total"} <= names
        assert not [name for name in names if name.endswith("_created")]
