"""Iteration-level scheduling without selective batching: all spans of a batch are padded to the
longest span, as if every operation needed equal shapes (Orca, section 3.1).

    python -m benchmarks.paper.baselines.padded    starts a stage whose ranks pad

Results of padding tokens are dropped. So the sampled tokens are the same as with selective
batching, but an iteration takes the time of the padded batch.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.worker import __main__ as worker
from services.worker.channel import RankEnd
from services.worker.engine.input_batch import BatchBuilder, InputBatch
from services.worker.engine.plan import Spans
from services.worker.rank import __main__ as rank_process
from services.worker.rank.activity import Activity
from services.worker.rank.rank import Rank
from services.worker.settings import RankSettings


class PaddedBatchBuilder(BatchBuilder):
    """Builds batches in which all spans are padded to the longest span."""

    def build(self, spans: Spans) -> InputBatch:
        """Returns the batch of `spans`, padded to the longest span. The keys and values of padding
        tokens are written to a block that no request uses."""
        widths = np.full_like(spans.n_tokens, spans.n_tokens.max())
        end = int((spans.start_positions + widths).max())
        tables = self._table.padded_block_tables(
            spans.rows, -(-end // self._block_size), scratch=self._scratch
        )
        layout = self._layout(spans.start_positions, widths, tables)
        positions, slots = layout.positions, layout.slots
        ends = spans.start_positions + spans.n_tokens
        is_padding = positions >= ends[layout.span_of_token]
        scratch_slots = self._scratch * self._block_size + positions % self._block_size
        return self._batch(
            spans,
            replace(
                layout,
                positions=np.minimum(positions, self._table.max_model_len - 1),
                slots=np.where(is_padding, scratch_slots, slots),
            ),
        )

    def n_tokens(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens, padding included, of a batch with spans of `lengths`."""
        return len(lengths) * max(lengths)


def start(settings: RankSettings, channel: RankEnd, activity: Activity) -> Rank:
    """Loads the model and returns a rank that pads all spans of a batch to the longest. CUDA graphs
    are off, because they require selective batching."""
    settings = settings.model_copy(update={"cuda_graphs": False})
    return rank_process.start(settings, channel, activity, batch_builder=PaddedBatchBuilder)


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        rank_process.main(start)
    sys.exit(worker.main(rank_module="benchmarks.paper.baselines.padded"))
