"""An upper bound on the throughput of any schedule, and an order that knows all lengths.

The bound holds for every schedule of this engine that computes each token of prompts and outputs at
least once, shares no tokens among requests, and has at most `max_batch_size` requests in an
iteration. Schedules may know all lengths, preempt requests and recompute them. The bound is
computed for one stage, which must run every iteration:

- An iteration generates at most one token of a request. So the number of iterations is at least the
  number of generated tokens divided by the largest batch. Each iteration takes the fixed time of
  its layers. In addition, all iterations together read the weights and multiply; the longer of
  these two times counts.
- Attention takes a time for each span, slot and pair of tokens, whatever the iterations are.
- Memory: a request in an iteration holds the slots of its tokens until the iteration has passed all
  stages. So the slots held, multiplied by the time, are at least the sum over all spans of their
  slots times the shortest time of an iteration. They are at most all slots times the whole time.

`ShortestFirst` is not a bound. This order admits the requests with the fewest remaining tokens,
which no real scheduler knows, and so has short latencies when many requests wait.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from benchmarks.paper.gpu_costs import Gpu, GpuCosts
from benchmarks.paper.models import BYTES, PaperModel
from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request
from simulator.costs import IterationWork
from simulator.workload import Lengths


def shortest_s(
    lengths: Sequence[Lengths], model: PaperModel, gpu: Gpu, *, max_batch_size: int
) -> float:
    """Returns a lower bound, in seconds, of the time in which any schedule can run all requests."""
    costs = GpuCosts(model, gpu)
    n_output = sum(each.n_output for each in lengths)
    # The last token is sampled and never an input.
    n_tokens = sum(each.n_tokens - 1 for each in lengths)
    n_layers = model.n_layers / model.n_stages
    weights = model.n_layer_weights / model.tp_size
    reading_s = BYTES * weights / gpu.bandwidth
    iteration_s = n_layers * (gpu.layer_s + reading_s)
    attention_s = sum(_attention_s(each, costs) for each in lengths)

    n_iterations = max(-(-n_output // max_batch_size), max(each.n_output for each in lengths))
    products_s = max(n_iterations * reading_s, n_tokens * weights / gpu.products)
    computing_s = n_layers * (n_iterations * gpu.layer_s + products_s) + attention_s
    computing_s += n_iterations * gpu.sync_s * (model.n_stages > 1)

    held_s = sum(map(_slots_of_spans, lengths)) * model.n_stages * iteration_s
    return max(computing_s, held_s / model.n_slots)


def _attention_s(each: Lengths, costs: GpuCosts) -> float:
    """Returns a lower bound, in seconds, of the time that one stage needs for the attention of a
    request. The prompt counts as one span or as spans of one token, whichever is faster."""
    nothing = costs.stage_s(1, IterationWork(0, 0, 0, 0, 0))
    n_pairs = each.n_prompt * (each.n_prompt + 1) // 2
    decodes = range(each.n_prompt + 1, each.n_prompt + each.n_output)
    prompt_s = min(
        costs.stage_s(1, IterationWork(0, 0, 0, n_pairs, 0)),
        costs.stage_s(1, IterationWork(0, 0, n_pairs, 0, 0)),
    )
    return (
        prompt_s
        - nothing
        + costs.stage_s(1, IterationWork(0, 0, sum(decodes), 0, each.n_output))
        - nothing
    )


def _slots_of_spans(each: Lengths) -> int:
    """Returns the number of K/V slots that a request holds, summed over its iterations. In the
    first iteration the request holds the slots of the prompt, and in each further iteration one
    more slot."""
    return sum(range(each.n_prompt, each.n_prompt + each.n_output))


class ShortestFirst(Order):
    """An order of waiting requests by the number of remaining tokens. Running requests stay in the
    order of their admission."""

    name: ClassVar[str] = "shortest first"

    def __init__(self) -> None:
        self._waiting: list[Request] = []  # by the number of remaining tokens
        self._n_places = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Inserts a request into the waiting requests at its position in the order."""
        insort(self._waiting, request, key=_n_to_come)

    def restore(self, requests: Sequence[Request]) -> None:
        """Inserts preempted requests into the waiting requests again."""
        for request in requests:
            self.add(request)

    def admit(self, request: Request) -> None:
        """Removes an admitted request from the waiting requests. Its place is after all running
        requests."""
        self._waiting.remove(request)
        request.place = self._n_places
        self._n_places += 1

    def remove(self, request: Request) -> None:
        """Removes a request from the waiting requests. Does nothing if the request is not
        waiting."""
        if request in self._waiting:
            self._waiting.remove(request)

    def line_up(
        self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
    ) -> Iterator[Request]:
        """Yields the ready requests, and then the requests in `waiting`. If `waiting` is None,
        yields all waiting requests after the ready ones, the shortest first."""
        return chain(ready, self._waiting if waiting is None else waiting)

    def rank(self, request: Request) -> tuple[int, ...]:
        """Returns the sort key of a request for preemption: the request with the most remaining
        tokens is preempted first."""
        return (_n_to_come(request), request.place)


def _n_to_come(request: Request) -> int:
    """Returns the number of iterations that a request still needs if its answer has exactly
    `max_new_tokens` tokens. The prompt counts as one iteration."""
    return request.max_new_tokens - len(request.generated_token_ids)
