"""A deployment whose scheduler sets the number of workers: it sleeps, wakes, grows and shrinks."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import HANG_S, OVERLAYS, Cluster
from tests.cluster.conftest import deployment
from tests.cluster.figures import Figures
from tests.cluster.streams import Streams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

N_STAGES = 2


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, figures: Figures) -> Iterator[Cluster]:
    """The demo with an autoscaler, whose model may sleep."""
    yield from deployment(cluster, OVERLAYS / "scaled", figures)


def until_workers(scaled: Cluster, n_pipelines: int) -> float:
    """Waits until there are workers for so many pipelines, all ready; returns the seconds."""

    def are_there() -> bool:
        workers = scaled.pods("worker")
        return [worker.is_ready for worker in workers] == [True] * (n_pipelines * N_STAGES)

    return scaled.until(are_there, what=f"there are workers for {n_pipelines} pipelines")


def test_a_model_sleeps_and_a_request_wakes_it(scaled: Cluster, figures: Figures) -> None:
    until_workers(scaled, 0)
    frontends = scaled.pods("frontend")
    assert [pod.is_ready for pod in frontends] == [True] * len(frontends)
    figures.add("0 to 1 pipeline: request to answer", scaled.until_answers())
    assert len(scaled.pods("worker")) == N_STAGES


def test_streams_go_on_from_one_pipeline_to_three_and_back(
    scaled: Cluster, figures: Figures
) -> None:
    streams = Streams(scaled, figures)  # so many clients that pipelines are added
    with streams.through("pipelines to one", n_clients=1):
        until_workers(scaled, 1)
    with streams.through("1 to 3 pipelines"):
        figures.add("1 to 3 pipelines: all workers ready", until_workers(scaled, 3))
    with streams.through("3 to 1 pipelines", n_clients=1):
        figures.add("3 to 1 pipelines", until_workers(scaled, 1))
