"""The memory in which the layers of a stage store keys, values and states during an epoch."""

from __future__ import annotations

from kernels.ops import LayerKV
from services.worker.engine.kv_cache import Allocate, KVCache
from services.worker.engine.recurrent_state import RecurrentState
from services.worker.models import StageModel


class StageStorage:
    """The memory of a rank in which the layers of its stage keep, during an epoch, the keys and
    values of tokens or a state of each request."""

    def __init__(
        self,
        model: StageModel,
        *,
        n_kv_blocks: int,
        block_size: int,
        n_state_rows: int,
        allocate_kv: Allocate | None = None,
    ) -> None:
        """Allocates `n_kv_blocks` blocks and `n_state_rows` states, and one more of each for
        padding. `allocate_kv` returns the memory for keys and values, by default new memory."""
        self.kv = KVCache(
            model.config,
            model.layers,
            n_blocks=n_kv_blocks + 1,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
            tp_size=model.tp_size,
            groups=model.kv_groups,
            allocate=allocate_kv,
        )
        states = RecurrentState(
            model.config,
            model.layers,
            n_rows=n_state_rows,
            dtype=model.dtype,
            device=model.device,
            tp_size=model.tp_size,
        )
        self.states = None if states.is_empty else states
        """The states of requests. None if no layer keeps states."""
        self.layers: tuple[LayerKV, ...] = tuple(
            kv if state is None else state
            for kv, state in zip(self.kv.layers, states.layers, strict=True)
        )
        """For each layer, its keys and values, or its states."""
