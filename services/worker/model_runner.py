"""One stage's share of an iteration: flat batch in, hidden states or tokens out.

    prepare → forward → (last stage) sample

Holds what an epoch's computation needs: the stage's weights, which outlive the epoch, and K/V
storage and request table, which do not. Moving tensors between stages and answering the engine
master are not its business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.input_batch import InputBatch, IterationPlan, RequestTable, n_batch_tokens
from services.worker.kv_cache import KVCache
from services.worker.models import StageModel
from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.sampler import sample
from services.worker.settings import Batching


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
    ) -> None:
        ranks = tensor_parallel
        if (ranks.rank, ranks.size) != (model.tp_rank, model.tp_size):
            raise ValueError(
                f"weights of rank {model.tp_rank} of {model.tp_size} cannot run as rank "
                f"{ranks.rank} of {ranks.size}"
            )
        self.model = model
        self._ranks = ranks
        self._is_padded = batching == "padded"
        self._kv_cache = KVCache(
            model.config,
            len(model.layers),
            n_blocks=n_kv_blocks + self._is_padded,  # one more for what padding stores
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
        )

    def prepare(self, plan: IterationPlan) -> InputBatch:
        """Takes in a plan, in the order of iterations; raises PlanError.

        Needs no activations, so it can be done while these are on their way.
        """
        key_cache, _ = self._kv_cache.layers[0]
        return InputBatch.build(
            plan,
            self._table,
            ops=self.model.ops,
            key_cache=key_cache,
            windows=self.model.windows,
            is_padded=self._is_padded,
        )

    def empty_hidden(self, n_tokens: Sequence[int]) -> Tensor:
        """Room for the previous stage's hidden states of spans of `n_tokens`.

        [tokens of the batch, hidden_size]
        """
        n_rows = n_batch_tokens(n_tokens, is_padded=self._is_padded)
        shape = (n_rows, self.model.hidden_size)
        return torch.empty(shape, dtype=self.model.dtype, device=self.model.device)

    def forward(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        """Runs this stage's layers.

        `hidden` is what the previous stage returned, [n_tokens, hidden_size], and None on the first
        stage; the result has the same shape. A batch is run once: it writes K/V.
        """
        with torch.inference_mode():
            return self.model.forward(
                self._input(batch, hidden),
                positions=batch.positions,
                slots=batch.slots,
                attention=batch.attention,
                kv=self._kv_cache.layers,
                ranks=self._ranks,
            )

    def sample(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """The tokens of the spans that are sampled, in the plan's order: [n_sampled] int64.

        `hidden` is what `forward` returned on the last stage. Raises NonFiniteLogits.
        """
        with torch.inference_mode():
            if not len(batch.sampled_tokens):
                return torch.empty(0, dtype=torch.int64, device=self.model.device)
            logits = self.logits(batch, hidden)
            tokens = sample(logits, batch.sampling, greedy=self.model.ops.greedy)
            self._table.keep_tokens(batch.sampled_rows, tokens)
            return tokens

    def logits(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Logits after the spans that are sampled, [n_sampled, vocab_size]; see StageModel."""
        with torch.inference_mode():
            return self.model.logits(hidden.index_select(0, batch.sampled_tokens), self._ranks)

    def _input(self, batch: InputBatch, hidden: Tensor | None) -> Tensor:
        if self.model.is_first != (hidden is None):
            raise ValueError("the first stage takes no hidden states, every other stage does")
        if hidden is None:
            return self.model.embed(batch.token_ids, self._ranks)
        expected = (len(batch.positions), self.model.hidden_size)
        if hidden.shape != expected or hidden.dtype != self.model.dtype:
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} of {hidden.dtype} where the batch needs "
                f"{expected} of {self.model.dtype}"
            )
        return hidden
