"""One stage's share of an iteration: from a flat batch to hidden states or tokens.

    prepare → forward, or on the last stage: prepare → logits → sample → logprobs, vectors

A model runner holds the stage's weights, which are kept from one epoch to the next, and the K/V
storage and the request table, which belong to one epoch. It neither transfers tensors between
stages nor reports to the engine master.

Callers use a model runner within `torch.inference_mode`, which they enter once. The mode saves
PyTorch a little work, but entering it for every iteration would cost more.

On a GPU the host does not wait for the device: an iteration is launched, and the next one may be
prepared and launched while the first one is computed. An iteration is prepared only after the
previous one has been launched completely. So everything that iterations share (the table on the
host; tokens, K/V and the inputs of graphs on the device) changes in the order of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.forms.logits import Logits
from kernels.forms.sampling_columns import ALL_GREEDY, AllowedTokens, SamplingColumns
from kernels.upload import Uploads, uploads_for
from services.worker.engine.constraints import Grammars
from services.worker.engine.decode_graphs import DecodeGraphs, Graph
from services.worker.engine.input_batch import BatchBuilder, InputBatch
from services.worker.engine.kv_cache import Allocate
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.logprobs import BatchLogprobs, logprobs_of
from services.worker.engine.plan import IterationPlan, PlanError
from services.worker.engine.pooled_requests import BatchVectors
from services.worker.engine.recurrent_state import MAX_STATE_ROWS
from services.worker.engine.request_table import MAX_ROWS, RequestTable
from services.worker.engine.stage_storage import StageStorage
from services.worker.models import StageModel
from services.worker.models.adapters.adaptable_program import FittedAdapter
from services.worker.models.stage import StageBatch
from services.worker.models.tensor_parallel import SINGLE, HeadShare, TensorParallel


class ModelRunner:
    """Runs the iterations of one epoch on one rank of a stage. Each epoch has a new model runner.

    All ranks of a stage run equal plans, and each rank gets the complete results.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        n_kv_blocks: int,
        block_size: int,
        tensor_parallel: TensorParallel = SINGLE,
        batch_builder: type[BatchBuilder] = BatchBuilder,
        grammars: Grammars | None = None,
        new_graph: Callable[[], Graph] | None = None,
        max_graph_batch_size: int = 0,
        uploads: Uploads | None = None,
        max_batch_tokens: int | None = None,
        n_state_rows: int = MAX_STATE_ROWS,
        allocate_kv: Allocate | None = None,
        max_loaded_adapters: int = 0,
    ) -> None:
        """With `new_graph`, batches of up to `max_graph_batch_size` decodes run as graphs. The
        model's operations must then allow fixed shapes (`Ops.has_fixed_shapes`). A batch has at
        most `max_batch_tokens` tokens, by default one for each K/V slot.

        If layers keep a state of each request, at most `n_state_rows` requests run at a time. With
        0 rows all requests share one state, and their results are meaningless. `allocate_kv`
        returns the memory for keys and values, by default new memory. At most `max_loaded_adapters`
        adapters may be added to the model's own adapters at a time.
        """
        ranks = tensor_parallel
        if (ranks.rank, ranks.size) != (model.tp_rank, model.tp_size):
            raise ValueError(
                f"weights of rank {model.tp_rank} of {model.tp_size} cannot run as rank "
                f"{ranks.rank} of {ranks.size}"
            )
        self.model = model
        self._ranks = ranks
        self.storage = storage = StageStorage(
            model,
            n_kv_blocks=n_kv_blocks,
            block_size=block_size,
            n_state_rows=n_state_rows,
            allocate_kv=allocate_kv,
        )
        """Keys, values and states of the epoch."""
        self._table = _table(
            model,
            n_kv_blocks,
            block_size,
            has_states=storage.states is not None,
            n_state_rows=n_state_rows,
            grammars=grammars,
            max_loaded_adapters=max_loaded_adapters,
        )
        self._max_batch_tokens = max_batch_tokens or n_kv_blocks * block_size
        self._uploads = uploads = uploads or uploads_for(model.device)
        self._builder = batch_builder(
            self._table,
            ops=model.ops,
            key_caches=storage.kv.key_caches(),
            n_heads=len(HeadShare.of(model.config, model.tp_rank, model.tp_size).q),
            uploads=uploads,
            windows=model.kv_groups.windows_on(model.layers, model.config),
            is_causal=model.config.is_causal,
            states=storage.states,
            vocab_size=model.config.vocab_size if model.is_last else None,
        )
        self.graphs: DecodeGraphs | None = None
        """The graphs for batches of decodes. None if decodes do not run as graphs."""
        if new_graph is not None and max_graph_batch_size > 0:
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
        """Applies a plan to the request table and returns the plan's batch. Raises PlanError if the
        plan violates the protocol.

        Plans must be prepared in the order of iterations, and a batch must be run before the next
        one is prepared. The hidden states of the previous stage may still be in transfer.
        """
        spans = self._table.apply(plan)
        table = self._table
        if (
            self.graphs is None
            or table.logprobs.are_of_prompts(spans)
            or table.pooled.are_in(spans)
        ):
            return self._builder.build(spans)  # graphs do not keep hidden states
        shape = self.graphs.shape_of(spans)
        return self._builder.build(spans) if shape is None else self.graphs.build(spans, shape)

    def empty_hidden(self, n_tokens: Sequence[int]) -> Tensor:
        """Returns an uninitialised tensor [n_batch_tokens, hidden_size], into which the hidden
        states of the previous stage are received, for spans of `n_tokens` tokens.

        Raises PlanError for too many tokens. The rest of the plan is checked by `prepare`.
        """
        if sum(n_tokens) > self._max_batch_tokens:
            raise PlanError(
                f"spans of {sum(n_tokens)} tokens, {self._max_batch_tokens} may be in a batch"
            )
        return self._room(self._builder.n_tokens(n_tokens))

    def forward(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """Runs this stage's layers and returns hidden states [n_tokens, hidden_size]. On the last
        stage these include the rows that pad a graph's batch.

        `hidden` are the hidden states from the previous stage, None on the first stage. A batch
        must be run only once, by this method or by `logits`, because running it writes K/V.
        """
        if batch.shape is None or self.graphs is None or self.model.is_last:
            return self._layers(batch, hidden)
        # The result may still be in transfer when the next graph runs.
        return self._run_graph(self.graphs, batch, hidden).clone()

    def logits(self, batch: InputBatch, hidden: Tensor | None) -> Logits:
        """Runs the last stage and returns the logits from which tokens are sampled, [n_sampled,
        vocab_size]. The next run may overwrite the logits."""
        of_prompts = batch.logprobs is not None and batch.logprobs.of_prompts
        if of_prompts or batch.pooled is not None or not self.model.has_head:
            hidden = self._layers(batch, hidden)
            return Logits(self._logits_at(batch, hidden, batch.sampled_tokens), hidden=hidden)
        if batch.shape is None or self.graphs is None:
            inputs = self._inputs(batch, hidden)
            return self.model.sampled_logits(
                inputs, self._stage_batch(batch), self.storage.layers, batch.sampled_tokens
            )
        logits = self._run_graph(self.graphs, batch, hidden)
        if batch.n_sampled < batch.n_spans:
            logits = logits.index_select(0, batch.sampled_tokens)
        return Logits(logits)

    def sample(self, batch: InputBatch, logits: Logits) -> Numbers:
        """Returns the sampled tokens in the order of the plan, [n_sampled] int64. A token is -1 if
        its `logits` are not finite.

        Must be called for every batch, because penalties count the tokens of every batch. The next
        run may overwrite the result.
        """
        if batch.counted is not None:
            self._table.count(batch.token_ids, batch.counted)
        tokens: Numbers | None = logits.argmax
        if tokens is None or batch.sampling is not ALL_GREEDY or batch.constrained is not None:
            tokens = self._chosen(batch, logits.values)
        self._table.keep_tokens(batch.sampled_rows, tokens)
        if batch.constrained is not None:
            self._table.constraints.sampled(batch.constrained, tokens)
        return tokens

    def cut(self, batch: InputBatch) -> list[int]:
        """Returns the indices of the sampled tokens whose outputs end early, because a step of the
        grammar takes too much work. Must be called after `sample`."""
        if batch.constrained is None:
            return []
        return self._table.constraints.cut(batch.constrained)

    def logprobs(self, batch: InputBatch, logits: Logits, tokens: Numbers) -> BatchLogprobs | None:
        """Returns the log-probabilities that requests of the batch ask for. Returns None if no
        request asks for any.

        `tokens` were sampled from `logits`. Must be called before the next batch is run.
        """
        if batch.logprobs is None:
            return None

        def logits_at(places: Tensor) -> Tensor:
            if logits.hidden is None:
                raise ValueError("the logits of prompts need hidden states")
            return self._logits_at(batch, logits.hidden, places)

        return logprobs_of(batch.logprobs, logits.values, tokens, logits_at=logits_at)

    def vectors(self, batch: InputBatch, logits: Logits) -> BatchVectors | None:
        """Returns the vectors (embeddings or scores) of the prompts that end in the batch. Returns
        None if there are none.

        `logits` are the result of `logits` for the batch. Must be called once for every batch,
        before the next one is prepared, because it also stores the hidden states of prompts that do
        not end yet.
        """
        wanted, pooler = batch.pooled, self.model.pooler
        if wanted is None or pooler is None or logits.hidden is None:
            return None
        states = pooler.states(logits.hidden.index_select(0, wanted.places), self._ranks)
        made = [
            (span, pooler.vector(state)) for span, state in self._table.pooled.pool(wanted, states)
        ]
        if not made:
            return None
        spans, vectors = zip(*made, strict=True)
        return BatchVectors(spans, torch.stack(vectors))

    def add_adapter(self, fitted: FittedAdapter) -> None:
        """Adds an adapter, for the batches that are prepared from now on. Raises ValueError if the
        adapter's index is too large or in use."""
        self.model = self.model.with_adapters([*self.model.fitted, fitted])
        self._table.add_adapter(fitted.digest, fitted.index)

    def drop_adapter(self, digest: str) -> None:
        """Drops an adapter that was added. No later batch may use it."""
        left = [one for one in self.model.fitted if one.digest != digest]
        self.model = self.model.with_adapters(left)
        self._table.drop_adapter(digest)

    def close(self) -> None:
        """Destroys the recorded graphs of the epoch. Must be called before its process groups are
        closed."""
        if self.graphs is not None:
            self.graphs.drop()
            self.graphs = None  # graphs refer to this runner, whose K/V must be freed

    def _layers(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        inputs = self._inputs(batch, hidden)
        return self.model.forward(inputs, self._stage_batch(batch), self.storage.layers)

    def _logits_at(self, batch: InputBatch, hidden: Tensor, places: Tensor) -> Tensor:
        """Returns the logits that follow the tokens at the indices `places` [n] of a batch, [n,
        vocab_size]."""
        if not len(places):
            return hidden.new_empty(0, self.model.config.vocab_size)
        adapters = None if batch.adapters is None else batch.adapters.tokens
        return self.model.logits(
            hidden.index_select(0, places),
            self._ranks,
            None if adapters is None else adapters.at(places.cpu().numpy()),
        )

    def _compute_decodes(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        hidden = self._layers(batch, hidden)
        return self.model.logits(hidden, self._ranks) if self.model.is_last else hidden

    def _chosen(self, batch: InputBatch, logits: Tensor) -> Numbers:
        if not batch.n_sampled:
            tokens = torch.empty(0, dtype=torch.int64, device=self.model.device)
        else:
            tokens = self.model.ops.sample(logits, self._sampling(batch))
        return tokens.numpy() if tokens.is_cpu else tokens

    def _sampling(self, batch: InputBatch) -> SamplingColumns:
        """Returns the arguments of `Ops.sample` for a batch, with the masks of matchers. Call it as
        late as possible, so that the host makes the masks while the device computes."""
        if batch.constrained is None:
            return batch.sampling
        masks = self._table.constraints.masks(batch.constrained, self._uploads)
        self._uploads.flush()
        return replace(batch.sampling, allowed=both(batch.sampling.allowed, masks))

    def _run_graph(self, graphs: DecodeGraphs, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        self._check(hidden, n_tokens=batch.n_spans)
        return graphs.run(batch, hidden)

    def _stage_batch(self, batch: InputBatch) -> StageBatch:
        return StageBatch(
            batch.positions,
            batch.kv[0].slots,
            batch.kv[0].attention,
            self._ranks,
            groups=batch.kv,
            states=batch.states,
            adapters=batch.adapters,
        )

    def _inputs(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """Returns the input of the model: tokens, or hidden states from the previous stage."""
        self._check(hidden, n_tokens=len(batch.positions))
        return batch.token_ids if hidden is None else hidden

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


def both(static: AllowedTokens | None, grammars: AllowedTokens) -> AllowedTokens:
    """Combines the masks of rows with fixed lists of allowed or banned tokens and the masks of rows
    with a matcher. No row may be in both."""
    if static is None:
        return grammars
    rows, order = torch.cat((static.rows, grammars.rows)).sort()
    return AllowedTokens(rows, torch.cat((static.masks, grammars.masks)).index_select(0, order))


def _table(
    model: StageModel,
    n_kv_blocks: int,
    block_size: int,
    *,
    has_states: bool,
    n_state_rows: int,
    grammars: Grammars | None,
    max_loaded_adapters: int,
) -> RequestTable:
    return RequestTable(
        n_kv_blocks=n_kv_blocks,
        block_size=block_size,
        n_groups=len(model.kv_groups.windows),
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_position_embeddings,
        device=model.device,
        keeps_tokens=model.is_first and model.is_last,
        counts_tokens=model.is_last,
        has_states=has_states,
        max_rows=n_state_rows if has_states and n_state_rows else MAX_ROWS,
        grammars=grammars,
        adapters=[one.digest for one in model.fitted],
        max_loaded_adapters=max_loaded_adapters,
        pooling=None if model.pooler is None else model.pooler.pooling,
    )
