"""The cost of a slow network between nodes for a deployed pipeline.

    python -m benchmarks.control.link_delay

Needs a cluster (KUBECONFIG) that serves `tests/cluster/overlays/demo`: two stages on two nodes.
Clients keep enough requests running to fill all batches. The benchmark runs three times: with one
batch in flight (lock step), with one batch for each stage (a full pipeline), and with one batch
more than that. Prints the median time from one iteration to the next, from the scheduler's own
records of the iterations in which a full batch decodes. To compare, run the benchmark on a cluster
with plain links and on a cluster with delayed links. In lock step every iteration waits for its
messages; with more batches in flight, other batches are computed in that time.

Each rank has one thread, so that nodes on one machine do not share cores by chance.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import grpc
from orcinus.v1 import watch_pb2, watch_pb2_grpc
from tqdm import tqdm

from tests.cluster.cluster import FRONTEND, NAMESPACE, Cluster

MAX_BATCH_SIZE = 16
N_STAGES = 2
DEPTHS = (1, N_STAGES, N_STAGES + 1)
N_TOKENS = 128
PROMPT = "If the file does not exist,"
SCHEDULER_PORT = 50052
PORT_TIMEOUT_S = 30
LONGEST_PAUSE_S = 1.0
"""Longest measured time between two iterations, in seconds. A longer time means that there was no
work, and is ignored."""


def set_scheduler(cluster: Cluster, depth: int) -> None:
    """Sets the number of batches in flight to `depth`, and waits until the scheduler serves."""
    cluster.in_namespace(
        "set",
        "env",
        "deployment/orcinus-scheduler",
        f"ORCINUS_PIPELINE_DEPTH={depth}",
        f"ORCINUS_MAX_BATCH_SIZE={MAX_BATCH_SIZE}",
    )
    cluster.in_namespace("rollout", "status", "deployment/orcinus-scheduler", "--timeout=170s")
    cluster.wait_serving()
    cluster.until_answers()


def set_threads(cluster: Cluster) -> None:
    """Gives each rank one compute thread."""
    cluster.in_namespace("set", "env", "deployment/orcinus-worker", "ORCINUS_N_THREADS=1")
    cluster.wait_serving()


@contextlib.contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """Forwards a local port to the leading scheduler inside the context, and yields the local
    address."""
    command = ["kubectl", "-n", NAMESPACE, "port-forward", f"pod/{cluster.leader()}"]
    with subprocess.Popen(
        [*command, f":{SCHEDULER_PORT}"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()  # Forwarding from 127.0.0.1:PORT -> 50052
            yield said.split()[2]
        finally:
            process.terminate()


def record(cluster: Cluster, depth: int, seconds: float) -> list[watch_pb2.IterationEvent]:
    """Runs a load for `seconds` seconds, and returns the scheduler's records of the iterations that
    ran meanwhile."""
    records: list[watch_pb2.IterationEvent] = []
    load = cluster.load(
        host=FRONTEND,
        port=8000,
        clients=depth * MAX_BATCH_SIZE,
        seconds=seconds,
        body={"prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True},
    )
    with forwarded(cluster) as address, grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=PORT_TIMEOUT_S)
        call = watch_pb2_grpc.WatchServiceStub(channel).Watch(watch_pb2.WatchRequest())

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):  # it is cancelled below
                for message in call:
                    records.extend(
                        event.iteration for event in message.events if event.HasField("iteration")
                    )

        reader = threading.Thread(target=read)
        reader.start()
        with load as running:
            outcomes = running.outcomes()
        call.cancel()
        reader.join()
    if any(outcome["status"] != 200 for outcome in outcomes):
        raise SystemExit(f"requests failed: {outcomes[-1]}")
    return records


def periods_ms(records: Sequence[watch_pb2.IterationEvent], depth: int) -> list[float]:
    """Returns times per iteration in milliseconds. Each is averaged over `depth` iterations, which
    is one round trip of a batch."""
    records = sorted(records, key=lambda each: each.iteration)
    found = []
    for begin in range(len(records) - depth):
        around = records[begin : begin + depth + 1]
        is_full = all(
            len(each.n_tokens) == MAX_BATCH_SIZE and all(n == 1 for n in each.n_tokens)
            for each in around
        )
        took_ns = around[-1].sent_unix_ns - around[0].sent_unix_ns
        if is_full and took_ns < LONGEST_PAUSE_S * 1e9:
            found.append(took_ns / depth / 1e6)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each depth, in turn")
    arguments = parser.parse_args()
    cluster = Cluster()
    set_threads(cluster)
    found: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    order = [depth for _ in range(arguments.rounds) for depth in DEPTHS]
    for depth in tqdm(order, unit="measurement"):
        set_scheduler(cluster, depth)
        periods = periods_ms(record(cluster, depth, arguments.seconds), depth)
        found[depth].append(statistics.median(periods))
        tqdm.write(f"{depth} in flight: {found[depth][-1]:.2f} ms, {len(periods)} iterations")
    print(json.dumps({depth: round(statistics.median(found[depth]), 2) for depth in DEPTHS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
