"""Decode iterations as CUDA graphs: one launch instead of hundreds.

An iteration of decodes computes little, and the host takes longer to launch its kernels one by one
than the GPU takes to run them. A graph is a recording of these launches with fixed addresses and
sizes. So a batch is padded to one of a few shapes, and its inputs are copied to the addresses from
which the recording reads:

    batch size      1, 2, 4, 8; up to 64 in steps of 8, up to 256 in steps of 16, then of 32
    block tables    wide enough for sequences of 1,024, 2,048, 4,096, ... tokens, up to the longest

The width of the block tables decides how attention divides its work. With only one width, planning
and uploading short sequences would take as long as for long ones. Some shapes are recorded when an
epoch begins (`warm_up`), the others when they first occur. All ranks of a stage run equal plans, so
they record at the same time. A recording runs one additional iteration and takes up to a second.

Padding reads and writes a K/V block that belongs to no request. A graph computes the stage's share
of an iteration: the embedding on the first stage, the layers, and the logits on the last stage.
Tokens are sampled after the graph.

If another rank is lost during a recording, CUDA's error ends the process: a recording that has
begun cannot be undone, and PyTorch's allocator would treat it as still running.
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

# Bytes per span for uploads other than the inputs of layers: two indices, two rows and the sampling
# columns of each span, and the alignment of these arrays.
_BYTES_PER_SPAN = 128
_ALIGNMENT_BYTES = 256

_FIRST_WIDTH = 1024  # tokens
_WIDTH_FACTOR = 2

# A few MiB for each of some hundred recordings.
_RECORDINGS_BYTES = 1 << 29


def reserved_bytes(max_spans: int, result_bytes: int) -> int:
    """Returns the number of bytes of GPU memory that the graphs of an epoch may take. The result of
    an iteration has `result_bytes` for each span.

    The bytes of results are counted four times, because a graph also keeps three copies of the
    logits: before the soft cap, after the soft cap, and scaled.
    """
    return _RECORDINGS_BYTES + 4 * max_spans * result_bytes


class Graph(Protocol):
    """A recording of the kernels that a function launches."""

    def capture(self, function: Callable[[], object]) -> None:
        """Runs `function` once, and then records its kernels."""

    def replay(self) -> None:
        """Launches the recorded kernels again, on the current stream."""


class CudaGraph:
    """A recording of kernels as a CUDA graph."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], object]) -> None:
        """Records the kernels of `function`, as `Graph.capture` describes. Waits for the device."""
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # compiles kernels and allocates memory, which a recording must not do
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads, such as NCCL's watchdog, may use CUDA during the recording.
        with torch.cuda.graph(
            self._graph,
            pool=self._memory.pool,
            stream=stream,
            capture_error_mode="thread_local",
        ):
            function()

    def replay(self) -> None:
        """Launches the recorded kernels again, on the current stream."""
        self._graph.replay()


class GraphMemory:
    """A stream to record on, and memory for intermediate results, shared by an epoch's graphs.

    Graphs can share memory because they never run at the same time, and because no graph reads the
    results of another graph: results are copied elsewhere.
    """

    def __init__(self) -> None:
        cuda: Any = torch.cuda  # its streams have no type annotations
        self.stream = cuda.Stream()
        self.pool = cuda.graph_pool_handle()


def cuda_graphs() -> Callable[[], Graph]:
    """Returns a function that creates empty CUDA graphs for one epoch, on the current GPU."""
    memory = GraphMemory()
    return lambda: CudaGraph(memory)


class DecodeGraphs:
    """Runs batches of decodes as recorded graphs, one graph for each batch shape, during one
    epoch."""

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
        """`compute` runs the stage's share of an iteration. It takes a batch and received hidden
        states, and returns hidden states or logits, [n_spans, any]. `hidden` [max_spans,
        hidden_size] is the tensor for hidden states from the previous stage; None on the first
        stage. Its values must be finite, because padding is computed from them. Batches of more
        than `max_spans` spans do not use graphs."""
        self._builder = builder
        self._uploads = uploads
        self._compute = compute
        self._new_graph = new_graph
        self._max_spans = max_spans
        self._max_model_len = max_model_len
        self._block_size = block_size
        self.device = device
        self._hidden = hidden
        self._results: Tensor | None = None  # [max_spans, any], results of the last run
        self._recorded: dict[DecodeShape, _Recorded] = {}
        self._built: InputBatch | None = None  # the batch that was uploaded last

    @property
    def n_recorded(self) -> int:
        """Number of batch shapes that have been recorded."""
        return len(self._recorded)

    def shape_of(self, spans: Spans) -> DecodeShape | None:
        """Returns the shape to which a batch of `spans` is padded. Returns None if the batch cannot
        run as a graph."""
        n_spans = len(spans.rows)
        if n_spans > self._max_spans or spans.n_tokens.max() > 1:
            return None
        n_keys = int(spans.start_positions.max()) + 1
        return DecodeShape(
            n_spans=min(padded_size(n_spans), self._max_spans),
            n_columns=-(-padded_length(n_keys, self._max_model_len) // self._block_size),
        )

    def shapes(self) -> Iterator[DecodeShape]:
        """Yields all shapes that may be recorded, from short sequences to long ones.

        For each width of block tables the largest batch comes first, because the memory of its
        recording suffices for all smaller batches. The smaller batches follow in ascending order.
        """
        sizes = {min(padded_size(n), self._max_spans) for n in range(1, self._max_spans + 1)}
        *smaller, largest = sorted(sizes)
        length = 0
        while length < self._max_model_len:
            length = padded_length(length + 1, self._max_model_len)
            for n_spans in (largest, *smaller):
                yield DecodeShape(n_spans, -(-length // self._block_size))

    def record(self, shape: DecodeShape) -> None:
        """Records a graph for decodes of `shape`, unless there is one already."""
        if shape not in self._recorded:
            self._recorded[shape] = self._record(shape)

    def build(self, spans: Spans, shape: DecodeShape) -> InputBatch:
        """Returns the batch of `spans`, uploaded to the addresses from which the graph of `shape`
        reads."""
        if shape not in self._recorded:
            log.info("an iteration waits until decodes are recorded: %s", shape)
            self.record(shape)
        self._uploads.aim(self._recorded[shape].inputs)
        self._built = self._builder.build_decodes(spans, shape)
        return self._built

    def run(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """Runs the batch that was built last and returns the results without padding, [n_spans,
        any]. The next run overwrites the results."""
        if batch.shape is None or self._results is None or batch is not self._built:
            raise ValueError("the batch is not the one that was built last for a graph")
        if self._hidden is not None and hidden is not None:
            self._hidden[: batch.n_spans].copy_(hidden)
            if batch.n_spans < batch.shape.n_spans:  # earlier values there may not be finite
                self._hidden[batch.n_spans : batch.shape.n_spans].zero_()
        self._recorded[batch.shape].graph.replay()
        return self._results[: batch.n_spans]

    def drop(self) -> None:
        """Destroys all recordings of the epoch. Must be called before a process group is closed,
        because NCCL does not release a group that a recording uses."""
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
        # Layers may overwrite their input, and padding must not be computed from such values.
        return self._compute(batch, None if hidden is None else hidden.clone())


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded graph, and the tensors that must live as long as the graph."""

    graph: Graph
    inputs: Tensor  # [bytes] uint8, the memory to which batches are uploaded
    batch: InputBatch  # the batch with which the graph was recorded


def padded_size(n_spans: int) -> int:
    """Returns the smallest padded batch size that is at least `n_spans`."""
    if n_spans <= 8:
        return int(1 << (n_spans - 1).bit_length())
    step = 8 if n_spans <= 64 else 16 if n_spans <= 256 else 32
    return -(-n_spans // step) * step


def padded_length(n_keys: int, max_model_len: int) -> int:
    """Returns how many tokens the block tables of a graph cover if the longest sequence of the
    batch has `n_keys` tokens: the smallest possible number that suffices."""
    length = _FIRST_WIDTH
    while length < n_keys:
        length *= _WIDTH_FACTOR
    return min(length, max_model_len)
