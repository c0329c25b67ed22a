"""`python -m tests.worker.controller.hanging_rank`: a stage whose ranks hang at a second span, with
all threads but the main one alive."""

import sys
import time

from services.worker import __main__ as worker
from services.worker.channel import RankEnd
from services.worker.engine.input_batch import BatchBuilder, InputBatch
from services.worker.engine.plan import Spans
from services.worker.rank import __main__ as rank_process
from services.worker.rank.activity import Activity
from services.worker.rank.rank import Rank
from services.worker.settings import RankSettings


class HangingBuilder(BatchBuilder):
    """Builds the batches of spans that begin at position 0, and no other."""

    def build(self, spans: Spans) -> InputBatch:
        if spans.start_positions.any():
            time.sleep(3600)
        return super().build(spans)


def start(settings: RankSettings, channel: RankEnd, activity: Activity) -> Rank:
    """Returns a rank with real weights."""
    return rank_process.start(settings, channel, activity, batch_builder=HangingBuilder)


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        rank_process.main(start)
    sys.exit(worker.main(rank_module="tests.worker.controller.hanging_rank"))
