"""One stage's share of an iteration: flat batch in, hidden states or tokens out.

    prepare → forward → (last stage) sample

Holds what an epoch's computation needs: the stage's weights, which outlive the epoch, and K/V
storage and request table, which do not. Moving tensors between stages and answering the engine
master are not its business.

On a GPU nothing here waits for the device: an iteration is launched, and the next one may be
prepared and launched behind it. Iterations are prepared in their order, each after the one before
has been launched whole, so everything that they share (the table on the host, the tokens, K/V and
the inputs of graphs on the device) changes in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.upload import Uploads, uploads_for
from services.worker.decode_graphs import DecodeGraphs, Graph
from services.worker.input_batch import BatchBuilder, Batching, InputBatch, n_batch_tokens
from services.worker.kv_cache import KVCache
from services.worker.models import StageModel
from services.worker.models.tensor_parallel import SINGLE, HeadShare, TensorParallel
from services.worker.plan import IterationPlan
from services.worker.request_table import RequestTable


class ModelRunner:
    """Runs the iterations of one epoch on one rank of a stage. New for every epoch.

    Ranks that share a stage run the same plans; all of them have the results.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        n_kv_blocks: int,
        block_size: int,
        tensor_parallel: TensorParallel = SINGLE,
        batching: Batching = "selective",
        new_graph: Callable[[], Graph] | None = None,
        max_graph_batch_size: int = 0,
        uploads: Uploads | None = None,
    ) -> None:
        """Batches of up to `max_graph_batch_size` decodes run as graphs, if there is a `new_graph`;
        the model's operations must have fixed shapes for them (see `Ops.plan_attention`)."""
        ranks = tensor_parallel
        if (ranks.rank, ranks.size) != (model.tp_rank, model.tp_size):
            raise ValueError(
                f"weights of rank {model.tp_rank} of {model.tp_size} cannot run as rank "
                f"{ranks.rank} of {ranks.size}"
            )
        self.model = model
        self._ranks = ranks
        self._is_padded = batching == "padded"
        has_graphs = new_graph is not None and max_graph_batch_size > 0 and not self._is_padded
        self._kv_cache = KVCache(
            model.config,
            len(model.layers),
            n_blocks=n_kv_blocks + (self._is_padded or has_graphs),  # one more for padding
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
            tp_size=model.tp_size,
        )
        self._table = RequestTable(
            n_kv_blocks=n_kv_blocks,
            block_size=block_size,
            vocab_size=model.config.vocab_size,
            max_model_len=model.config.max_position_embeddings,
            device=model.device,
            keeps_tokens=model.is_first and model.is_last,
            counts_tokens=model.is_last,
        )
        uploads = uploads or uploads_for(model.device)
        key_cache, _ = self._kv_cache.layers[0]
        self._builder = BatchBuilder(
            self._table,
            ops=model.ops,
            key_cache=key_cache,
            n_heads=len(HeadShare.of(model.config, model.tp_rank, model.tp_size).q),
            uploads=uploads,
            windows=model.windows,
            vocab_size=model.config.vocab_size if model.is_last else None,
        )
        self.graphs: DecodeGraphs | None = None
        """Of batches of decodes, where there are any."""
        if new_graph is not None and has_graphs:
            self.graphs = DecodeGraphs(
                self._builder,
                uploads,
                compute=self._compute_decodes,
                new_graph=new_graph,
                max_spans=max_graph_batch_size,
                max_model_len=model.config.max_position_embeddings,
                block_size=block_size,
                device=model.device,
                hidden=None if model.is_first else self._room(max_graph_batch_size).zero_(),
            )

    def prepare(self, plan: IterationPlan) -> InputBatch:
        """Takes in a plan, in the order of iterations; raises PlanError.

        Needs no activations, so it can be done while these are on their way. The batch is to be run
        before the next one is prepared.
        """
        with torch.inference_mode():
            spans = self._table.apply(plan)
            if self._is_padded:
                return self._builder.build_padded(spans)
            if self.graphs is not None and (shape := self.graphs.shape_of(spans)) is not None:
                return self.graphs.build(spans, shape)
            return self._builder.build(spans)

    def empty_hidden(self, n_tokens: Sequence[int]) -> Tensor:
        """Room for the previous stage's hidden states of spans of `n_tokens`.

        [tokens of the batch, hidden_size]
        """
        return self._room(n_batch_tokens(n_tokens, is_padded=self._is_padded))

    def forward(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """What this stage makes of a batch: on the last stage the logits after the tokens that are
        sampled, [n_sampled, vocab_size], elsewhere hidden states [n_tokens, hidden_size].

        `hidden` is what the previous stage returned, and None on the first stage. A batch is run
        once: it writes K/V. Logits are to be used before the next batch is run.
        """
        with torch.inference_mode():
            if batch.shape is None or self.graphs is None:
                sampled = batch.sampled_tokens if self.model.is_last else None
                return self._layers(batch, hidden, sampled)
            self._check(hidden, n_tokens=batch.n_spans)
            result = self.graphs.run(batch, hidden)
            if not self.model.is_last:
                return result.clone()  # it may still be on its way when the next graph runs
            if len(batch.sampled_tokens) == batch.n_spans:
                return result
            return result.index_select(0, batch.sampled_tokens)

    def hidden_states(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """What this stage's layers make of a batch, [n_tokens, hidden_size], on every stage."""
        with torch.inference_mode():
            return self._layers(batch, hidden)

    def sample(self, batch: InputBatch, logits: Tensor) -> Tensor:
        """The tokens of the spans that are sampled, in the plan's order: [n_sampled] int64.

        `logits` is what `forward` returned on the last stage; where they are not finite, the token
        is -1. To be called for every batch, since penalties count the tokens of all.
        """
        with torch.inference_mode():
            if batch.counted is not None:
                self._table.count(batch.token_ids, batch.counted)
            if not len(batch.sampled_tokens):
                return torch.empty(0, dtype=torch.int64, device=self.model.device)
            tokens = self.model.ops.sample(logits, batch.sampling)
            self._table.keep_tokens(batch.sampled_rows, tokens)
            return tokens

    def close(self) -> None:
        """Lets go of the groups of the epoch, before they are closed."""
        if self.graphs is not None:
            self.graphs.drop()
            self.graphs = None  # which knows this runner: K/V would outlive the epoch

    def _compute_decodes(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        hidden = self._layers(batch, hidden)
        return self.model.logits(hidden, self._ranks) if self.model.is_last else hidden

    def _layers(
        self, batch: InputBatch, hidden: Tensor | None, sampled: Tensor | None = None
    ) -> Tensor:
        self._check(hidden, n_tokens=len(batch.positions))
        if hidden is None:
            hidden = self.model.embed(batch.token_ids, self._ranks)
        return self.model.forward(
            hidden,
            positions=batch.positions,
            slots=batch.slots,
            attention=batch.attention,
            kv=self._kv_cache.layers,
            ranks=self._ranks,
            sampled_tokens=sampled,
        )

    def _check(self, hidden: Tensor | None, *, n_tokens: int) -> None:
        if self.model.is_first != (hidden is None):
            raise ValueError("the first stage takes no hidden states, every other stage does")
        if hidden is None:
            return
        expected = (n_tokens, self.model.hidden_size)
        if hidden.shape != expected or hidden.dtype != self.model.dtype:
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} of {hidden.dtype} where the batch needs "
                f"{expected} of {self.model.dtype}"
            )

    def _room(self, n_tokens: int) -> Tensor:
        shape = (n_tokens, self.model.hidden_size)
        return torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
