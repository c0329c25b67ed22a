"""Decode iterations as recorded graphs: one launch in place of hundreds.

An iteration of decodes computes little, and launching its kernels one by one takes the host longer
than the GPU needs to run them. A graph is a recording of these launches, with the addresses and
sizes that they had. So a batch is padded to one of a few shapes, and its inputs are copied to where
the recording reads them:

    batch size      1, 2, 4, 8, then in steps of 8 to 64, of 16 to 256, of 32 above
    block tables    as wide as sequences of 1,024 tokens, 2,048, 4,096, ... and the longest

The width of the tables decides how attention divides its work, so one width would make short
sequences as slow to plan and to send as long ones. Some of the two dozen sizes and few widths are
recorded when an epoch begins (`warm_up`), the others when they first occur: all ranks of a stage
run the same plans, so they record together. A recording costs one more iteration, and a second or
less.

Padding reads and writes a block that no request has. A graph computes the stage's share: embedding
or received hidden states, layers, and on the last stage the logits. Sampling comes after it.

If another rank is lost within a recording, CUDA's error ends the process: a recording that has
begun cannot be taken back, and PyTorch's allocator would go on as if it lasted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.upload import Uploads
from services.worker.engine.input_batch import BatchBuilder, DecodeShape, InputBatch
from services.worker.engine.plan import Spans

log = logging.getLogger(__name__)

# Room for what is uploaded beside the inputs of layers: two places, two rows and the sampling
# columns of each span, and the alignment of these arrays.
_BYTES_PER_SPAN = 128
_ALIGNMENT_BYTES = 256

_FIRST_WIDTH = 1024  # tokens
_WIDTH_FACTOR = 2

# A few MiB for each of some hundred recordings.
_RECORDINGS_BYTES = 1 << 29


def reserved_bytes(max_spans: int, result_bytes: int) -> int:
    """Returns the bytes of a GPU that the graphs of an epoch may take, for results of
    `result_bytes` for each span.

    Results are counted four times: logits are also held before and after a cap, and scaled.
    """
    return _RECORDINGS_BYTES + 4 * max_spans * result_bytes


class Graph(Protocol):
    """A recording of the kernels that a function launches."""

    def capture(self, function: Callable[[], object]) -> None:
        """Runs `function` once, then records it."""

    def replay(self) -> None:
        """Launches the recorded kernels again, in the order of the current stream."""


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], object]) -> None:
        """Implements `Graph.capture`; waits for the device."""
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles and allocates what a recording must find
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads, such as those that watch over NCCL, go on as they like.
        with torch.cuda.graph(
            self._graph,
            pool=self._memory.pool,
            stream=stream,
            capture_error_mode="thread_local",
        ):
            function()

    def replay(self) -> None:
        """Implements `Graph.replay`."""
        self._graph.replay()


class GraphMemory:
    """A stream to record on, and memory for intermediate results, shared by an epoch's graphs.

    Graphs may share memory because they never run at the same time, and because none reads what
    another has left there: results are copied out.
    """

    def __init__(self) -> None:
        cuda: Any = torch.cuda  # whose streams have no types
        self.stream = cuda.Stream()
        self.pool = cuda.graph_pool_handle()


def cuda_graphs() -> Callable[[], Graph]:
    """Returns the maker of the graphs of one epoch on the current GPU."""
    memory = GraphMemory()
    return lambda: CudaGraph(memory)


class DecodeGraphs:
    """The recorded shapes of one epoch."""

    def __init__(
        self,
        builder: BatchBuilder,
        uploads: Uploads,
        *,
        compute: Callable[[InputBatch, Tensor | None], Tensor],
        new_graph: Callable[[], Graph],
        max_spans: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        hidden: Tensor | None,
    ) -> None:
        """`compute` is the stage's share of an iteration: from a batch and received hidden states
        to hidden states or logits, [n_spans, any]. `hidden` is room for received hidden states,
        [max_spans, hidden_size], on stages that receive; it must be finite, because padding
        computes with it. Batches of more than `max_spans` spans are not for graphs."""
        self._builder = builder
        self._uploads = uploads
        self._compute = compute
        self._new_graph = new_graph
        self._max_spans = max_spans
        self._max_model_len = max_model_len
        self._block_size = block_size
        self.device = device
        self._hidden = hidden
        self._results: Tensor | None = None  # [max_spans, any], of the last run
        self._recorded: dict[DecodeShape, _Recorded] = {}
        self._built: InputBatch | None = None  # the batch whose inputs graphs read now

    @property
    def n_recorded(self) -> int:
        """Number of shapes that have a graph."""
        return len(self._recorded)

    def shape_of(self, spans: Spans) -> DecodeShape | None:
        """Returns the shape to pad a batch of `spans` to; None if it is not for a graph."""
        n_spans = len(spans.rows)
        if n_spans > self._max_spans or spans.n_tokens.max() > 1:
            return None
        n_keys = int(spans.start_positions.max()) + 1
        return DecodeShape(
            n_spans=min(padded_size(n_spans), self._max_spans),
            n_columns=-(-padded_length(n_keys, self._max_model_len) // self._block_size),
        )

    def shapes(self) -> Iterator[DecodeShape]:
        """Yields all shapes that may be recorded, the commonest first: short sequences before long
        ones.

        For each width the largest batch comes first, since all others have room in the memory that
        its recording takes; the others follow from the smallest.
        """
        sizes = {min(padded_size(n), self._max_spans) for n in range(1, self._max_spans + 1)}
        *smaller, largest = sorted(sizes)
        length = 0
        while length < self._max_model_len:
            length = padded_length(length + 1, self._max_model_len)
            for n_spans in (largest, *smaller):
                yield DecodeShape(n_spans, -(-length // self._block_size))

    def record(self, shape: DecodeShape) -> None:
        """Records decodes of `shape` unless they have been recorded."""
        if shape not in self._recorded:
            self._recorded[shape] = self._record(shape)

    def build(self, spans: Spans, shape: DecodeShape) -> InputBatch:
        """Returns the batch of `spans`, uploaded to where the graph of `shape` reads it."""
        if shape not in self._recorded:
            log.info("an iteration waits until decodes are recorded: %s", shape)
            self.record(shape)
        self._uploads.aim(self._recorded[shape].inputs)
        self._built = self._builder.build_decodes(spans, shape)
        return self._built

    def run(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """Runs the batch that was built last and returns the results without padding, [n_spans,
        any]; the next run overwrites them."""
        if batch.shape is None or self._results is None or batch is not self._built:
            raise ValueError("the batch is not the one that was built last for a graph")
        if self._hidden is not None and hidden is not None:
            self._hidden[: batch.n_spans].copy_(hidden)
        self._recorded[batch.shape].graph.replay()
        return self._results[: batch.n_spans]

    def drop(self) -> None:
        """Destroys all recordings; NCCL does not let go of a group that is in one."""
        self._recorded.clear()

    def _record(self, shape: DecodeShape) -> _Recorded:
        hidden = None if self._hidden is None else self._hidden[: shape.n_spans]
        padding = self._builder.build_decodes(Spans.none(), shape)
        n_bytes = self._uploads.n_bytes + _BYTES_PER_SPAN * shape.n_spans + _ALIGNMENT_BYTES
        if self._results is None:
            result = self._compute_from(padding, hidden)
            self._results = result.new_empty(self._max_spans, *result.shape[1:])
        results = self._results[: shape.n_spans]
        inputs = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        self._uploads.aim(inputs)
        batch = self._builder.build_decodes(Spans.none(), shape)
        graph = self._new_graph()
        graph.capture(lambda: results.copy_(self._compute_from(batch, hidden)))
        return _Recorded(graph, inputs, batch)

    def _compute_from(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        # Layers use up what they are given, and padding would compute with what they leave.
        return self._compute(batch, None if hidden is None else hidden.clone())


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, and what must live as long as it does."""

    graph: Graph
    inputs: Tensor  # [bytes] uint8, where everything that is uploaded goes
    batch: InputBatch  # it was recorded with this batch, whose tensors must live as long as it


def padded_size(n_spans: int) -> int:
    """Returns the smallest recorded batch size that has room for `n_spans`."""
    if n_spans <= 8:
        return int(1 << (n_spans - 1).bit_length())
    step = 8 if n_spans <= 64 else 16 if n_spans <= 256 else 32
    return -(-n_spans // step) * step


def padded_length(n_keys: int, max_model_len: int) -> int:
    """Returns the shortest length in tokens that has room for `n_keys`, of the lengths for which
    tables of recorded batches are made."""
    length = _FIRST_WIDTH
    while length < n_keys:
        length *= _WIDTH_FACTOR
    return min(length, max_model_len)
