"""The cost of a scheduling decision: `select` and `apply` of a full batch, for pools of growing
size.

    python -m benchmarks.control.scheduler
    python -m benchmarks.control.scheduler --prefix-cache
    python -m benchmarks.control.scheduler --reserve

The requests of the batch decode. Every request that ends is replaced by a waiting request, so
admission, block allocation and release are included. Two batches are in flight, and the rank keeps
tokens for the next batch, as with one stage. In the fair order the requests belong to one client,
or to many clients in turn. Budget: 0.3 ms for both calls together at batch 64, independent of the
size of the pool. With `--prefix-cache` no two prompts are alike, so that every block is entered
into the cache and none is found. With `--reserve` requests reserve memory for their longest
possible sequences (the setting `admission`).
"""

import argparse
import itertools
import statistics
import time
from array import array
from collections import deque

from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler

ORDERS = ("fcfs", "fair", "fair, many")
BUDGET_MS = 0.3
BATCH_SIZE = 64
DEPTH = 2
PROMPT_TOKENS = 32
NEW_TOKENS = 64
N_CLIENTS = 1000


class Bench:
    """A scheduler under steady load: its batch is always full, and a new request is submitted for
    each one that ends, so that the queue keeps its length."""

    def __init__(
        self,
        policy: Policy,
        n_waiting: int,
        *,
        order: Order,
        n_clients: int = 1,
        has_prefix_cache: bool = False,
        expected_use: ExpectedUse | None = None,
    ) -> None:
        self._n_submitted = 0
        self._accounts = [AccountUse(AccountLimits(), name=str(n)) for n in range(n_clients)]
        self._in_flight: deque[Batch] = deque()
        self.scheduler = Scheduler(
            RequestPool(max_requests=n_waiting + BATCH_SIZE, order=order),
            KVManager(
                n_blocks=100 * BATCH_SIZE,
                block_size=16,
                has_prefix_cache=has_prefix_cache,
                expected_use=expected_use,
            ),
            policy=policy,
            pipeline_depth=DEPTH,
            token_hand_off=True,
        )
        self.scheduler.learn_overhead(2 * BATCH_SIZE * PROMPT_TOKENS)  # prompts fill the batch
        for _ in range(n_waiting + BATCH_SIZE):
            self.submit()

    def submit(self) -> None:
        """Submits one more request. Output lengths are staggered, so that some requests end in
        every iteration."""
        self._n_submitted += 1
        self.scheduler.submit(
            Request(
                request_id=RequestId(str(self._n_submitted)),
                prompt_token_ids=array(TOKEN_ID, [self._n_submitted]) * PROMPT_TOKENS,
                max_new_tokens=1 + self._n_submitted % NEW_TOKENS,
                account=self._accounts[self._n_submitted % len(self._accounts)],
            )
        )

    def iterate(self) -> tuple[float, float]:
        """Selects one batch and applies the result of the oldest batch in flight. Returns the
        seconds in `select` and in `apply`. The seconds in `apply` are 0 while too few batches are
        in flight."""
        start = time.perf_counter()
        batch = self.scheduler.select()
        selected = time.perf_counter()
        if batch is None or len(batch.spans) != BATCH_SIZE:
            raise RuntimeError("the batch is not full")
        self._in_flight.append(batch)
        if len(self._in_flight) < DEPTH:
            return selected - start, 0.0
        oldest = self._in_flight.popleft()
        tokens = [7] * BATCH_SIZE
        applying = time.perf_counter()
        updates = self.scheduler.apply(oldest.iteration, tokens)
        applied = time.perf_counter()
        for update in updates:
            if update.finish_reason is not None:
                self.submit()
        return selected - start, applied - applying


def order_of(name: str) -> tuple[Order, int]:
    """Returns the order of waiting requests that `name` names, and the number of clients that send
    requests."""
    if name == "fcfs":
        return FirstComeFirstServed(), 1
    return Fair(ageing_s=30.0, now=time.monotonic), N_CLIENTS if name == "fair, many" else 1


def measure(
    policy: Policy,
    order: str,
    n_waiting: int,
    n_iterations: int,
    *,
    has_prefix_cache: bool,
    is_optimistic: bool,
) -> tuple[float, float, float]:
    """Returns the median milliseconds per iteration of `select`, of `apply`, and of both
    together."""
    of_requests, n_clients = order_of(order)
    bench = Bench(
        policy,
        n_waiting,
        order=of_requests,
        n_clients=n_clients,
        has_prefix_cache=has_prefix_cache,
        expected_use=ExpectedUse() if is_optimistic else None,
    )
    for _ in range(n_iterations // 10):
        bench.iterate()
    times = [bench.iterate() for _ in range(n_iterations)]
    return (
        1e3 * statistics.median(select for select, _ in times),
        1e3 * statistics.median(apply for _, apply in times),
        1e3 * statistics.median(select + apply for select, apply in times),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--pools", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--reserve", action="store_true")
    arguments = parser.parse_args()
    print(
        f"batch {BATCH_SIZE}, medians of {arguments.iterations} iterations, budget {BUDGET_MS} ms"
    )
    print(
        f"{'policy':>8} {'order':>10} {'waiting':>8} {'select ms':>10} {'apply ms':>10} "
        f"{'both ms':>10}  budget"
    )
    policies: dict[str, Policy] = {
        "orca": OrcaPolicy(max_batch_size=BATCH_SIZE),
        "chunked": ChunkedPolicy(
            max_batch_size=BATCH_SIZE, max_batch_tokens=BATCH_SIZE * PROMPT_TOKENS
        ),
    }
    for name, policy in policies.items():
        for n_waiting, order in itertools.product(arguments.pools, ORDERS):
            select, apply, both = measure(
                policy,
                order,
                n_waiting,
                arguments.iterations,
                has_prefix_cache=arguments.prefix_cache,
                is_optimistic=not arguments.reserve,
            )
            verdict = "kept" if both <= BUDGET_MS else "BROKEN"
            print(
                f"{name:>8} {order:>10} {n_waiting:>8} {select:>10.3f} {apply:>10.3f} "
                f"{both:>10.3f}  {verdict}"
            )


if __name__ == "__main__":
    main()
