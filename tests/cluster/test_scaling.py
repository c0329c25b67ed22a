"""A deployment whose scheduler sets the number of workers: it sleeps, wakes, grows and shrinks."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import HANG_S, OVERLAYS, Cluster
from tests.cluster.conftest import deployment
from tests.cluster.figures import Figures
from tests.cluster.streams import STREAM_BODIES, STREAMS, content, failures

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

N_STAGES = 2
ONE_CLIENT = {**STREAMS, "clients": 1}


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, figures: Figures) -> Iterator[Cluster]:
    """The demo with an autoscaler, whose model may sleep."""
    yield from deployment(cluster, OVERLAYS / "scaled", figures)


def until_workers(scaled: Cluster, n_pipelines: int, *, ready: bool = True) -> float:
    """Waits until there are workers for so many pipelines and no others; returns the seconds."""

    def are_there() -> bool:
        workers = scaled.pods("worker")
        are_ready = not ready or all(worker.is_ready for worker in workers)
        return len(workers) == n_pipelines * N_STAGES and are_ready

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
    with scaled.load(**ONE_CLIENT) as load:
        undisturbed = {it["index"] % len(STREAM_BODIES): content(it) for it in load.finish()}
    with scaled.load(**STREAMS) as load:
        figures.add("1 to 3 pipelines: all workers ready", until_workers(scaled, 3))
        grown = load.finish()
    with scaled.load(**ONE_CLIENT) as load:
        figures.add("3 to 1 pipelines", until_workers(scaled, 1, ready=False))
        shrunk = load.finish()
    for what, outcomes in (("1 to 3", grown), ("3 to 1", shrunk)):
        assert failures(outcomes) == []
        longest_s = max(outcome["stream"]["longest_pause_s"] for outcome in outcomes)
        figures.add(f"{what} pipelines: longest pause of {len(outcomes)} streams", longest_s)
        for outcome in outcomes:
            assert content(outcome) == undisturbed[outcome["index"] % len(STREAM_BODIES)], outcome
