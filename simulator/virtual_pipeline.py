"""The stages of a pipeline in virtual time.

A stage runs batches in their order, one at a time. A stage begins a batch when it has finished the
batch before, and the plan (for stage 0) or the activations (for later stages) have come.
"""

from services.scheduler.core.batch import Batch
from simulator.costs import Costs, IterationWork


class VirtualPipeline:
    """The stages of a pipeline, and the times until which they are busy."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._free_s = [0.0] * costs.n_stages
        self.busy_s = [0.0] * costs.n_stages
        """Seconds for which each stage has been busy."""

    def send(self, batch: Batch, now_s: float) -> float:
        """Runs a batch that was selected at `now_s` through all stages; returns the virtual time,
        in seconds, at which the batch's tokens are applied."""
        costs = self._costs
        columns = batch.columns
        work = IterationWork.of(
            zip(columns.start_positions, columns.n_tokens, columns.is_sampled, strict=True)
        )
        ready_s = now_s + costs.plan_s
        for index in range(costs.n_stages):
            begin_s = max(ready_s, self._free_s[index])
            stage_s = costs.stage_s(index, work)
            self._free_s[index] = begin_s + stage_s
            self.busy_s[index] += stage_s
            ready_s = begin_s + stage_s + costs.hop_s
        return ready_s - costs.hop_s + costs.result_s
