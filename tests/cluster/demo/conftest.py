"""One deployment of the demo overlay for all tests of this folder: most of a deployment's minutes
are its beginning and its end."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import OVERLAYS, Cluster
from tests.cluster.conftest import deployment
from tests.cluster.figures import Figures
from tests.cluster.streams import Streams


@pytest.fixture(scope="package")
def deployed_demo(cluster: Cluster, figures: Figures) -> Iterator[Cluster]:
    """The demo overlay, which has served."""
    yield from deployment(cluster, OVERLAYS / "demo", figures)


@pytest.fixture
def demo(deployed_demo: Cluster) -> Cluster:
    """The demo overlay, serving again, whatever the test before has left."""
    deployed_demo.wait_serving()
    return deployed_demo


@pytest.fixture(scope="package")
def streams(deployed_demo: Cluster, figures: Figures) -> Streams:
    """Streams, and the tokens that each stream gets while nothing is disturbed."""
    deployed_demo.wait_serving()
    return Streams(deployed_demo, figures)
