"""Schedulers that are stopped, killed or lose what an operator deletes, under streams."""

import time

import pytest

from tests.cluster.cluster import HANG_S, OVERLAYS, Cluster, NotYet
from tests.cluster.figures import Figures
from tests.cluster.streams import Streams, unchanged

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

RENEWAL_S = 2
SOON_S = 40
"""More than what is promised takes on a machine that is overloaded, and less than the drain of 60 s
that a leader would take which gives its lease away at its end. The figures say how long it took."""
REFUSED_S = 40
"""More than the time for which a scheduler that never had its rights waits for them."""


def holder(cluster: Cluster) -> str:
    """Returns the process that leads; empty if there is no Lease, or none leads."""
    lease = cluster.get("lease", "orcinus-scheduler") or {}
    name: str = lease.get("spec", {}).get("holderIdentity") or ""
    return name


def test_the_leader_writes_a_deleted_lease_again_and_a_rollout_goes_on(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    schedulers, leader = demo.pods("scheduler"), holder(demo)
    with streams.through("Lease deleted"):
        for _ in range(3):
            demo.insist(lambda: demo.in_namespace("delete", "lease", "orcinus-scheduler"))
            written_s = demo.until(lambda: holder(demo) != "", what="the Lease is written")
            assert written_s < SOON_S
            assert holder(demo) == leader
            time.sleep(2 * RENEWAL_S)
        figures.add("Lease deleted to Lease written", written_s)
        assert holder(demo) == leader
        assert unchanged(schedulers, demo.pods("scheduler"))
        restart = ("rollout", "restart", "deployment/orcinus-scheduler")
        demo.insist(lambda: demo.in_namespace(*restart))
        demo.wait_serving()
    assert holder(demo) not in ("", leader)


def test_the_leader_may_create_its_lease_and_no_other(demo: Cluster) -> None:
    account = "system:serviceaccount:orcinus:orcinus-scheduler"

    def may(verb: str, name: str) -> bool:
        question = ("auth", "can-i", verb, f"leases.coordination.k8s.io/{name}", "--as", account)
        return demo.in_namespace(*question).strip() == "yes"

    assert may("create", "orcinus-scheduler")
    with pytest.raises(NotYet, match="no"):
        may("create", "another")


def test_a_leader_that_is_stopped_hands_over_and_new_requests_wait_no_longer_than_after_a_kill(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    leader = demo.leading_pod()
    with streams.through("leader stopped"):
        started = time.monotonic()
        demo.delete_pod(leader)
        demo.until(lambda: demo.leader() not in ("", leader.name), what="a new leader")
        demo.until_answers()
        took_s = time.monotonic() - started
        figures.add("leader stopped to next token", took_s)
        assert took_s < SOON_S
    demo.wait_serving()


def test_new_schedulers_do_not_wait_for_a_leader_that_is_gone(
    demo: Cluster, figures: Figures, streams: Streams
) -> None:
    before = demo.pods("scheduler")
    with streams.through("all schedulers killed"):
        demo.insist(
            lambda: demo.in_namespace(
                *("delete", "pod", "--grace-period=0", "--force", "--wait=false"),
                *(pod.name for pod in before),
            )
        )
        demo.until(
            lambda: any("scheduler" in pod.running for pod in demo.pods("scheduler")),
            what="a new scheduler runs",
        )
        started = time.monotonic()
        demo.until(
            lambda: demo.leader() not in ("", *(pod.name for pod in before)), what="a new leader"
        )
        figures.add("new scheduler runs to new leader", time.monotonic() - started)
        demo.until_answers()
    demo.wait_serving()


def test_what_is_deleted_by_mistake_stops_no_stream_and_can_be_applied_again(
    demo: Cluster, streams: Streams
) -> None:
    deleted = ("rolebinding/orcinus-scheduler", "service/orcinus-scheduler")
    pods = [pod for name in ("scheduler", "worker", "frontend") for pod in demo.pods(name)]
    leader = holder(demo)
    with streams.through(f"{' and '.join(deleted)} deleted for {REFUSED_S} s"):
        demo.insist(lambda: demo.in_namespace("delete", *deleted))
        time.sleep(REFUSED_S)
        demo.until_answers()
        demo.apply(OVERLAYS / "demo")
        demo.wait_serving()
    assert holder(demo) == leader
    after = [pod for name in ("scheduler", "worker", "frontend") for pod in demo.pods(name)]
    assert unchanged(pods, after)
