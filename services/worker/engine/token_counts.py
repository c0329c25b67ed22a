"""Counts of the occurrences of each token in requests with penalties, on the device that samples.

A token is counted when it is an input of an iteration. The rank has every input: plans carry the
tokens to all stages, and the rank itself has stored a token that a plan leaves out. Tokens whose
keys and values are in shared blocks are never inputs, and are counted when their request is
admitted. So all tokens before a sampled token have been counted when it is sampled, also with
chunked prefill.

A row of the counts takes 4 bytes for each token of the vocabulary, 513 KB for Llama 3. Only
requests with penalties have a row. The host does not wait for the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.forms.sampling_columns import IN_PROMPT

NOT_COUNTED = -1
"""Value used instead of a row number for a request whose tokens are not counted."""

# Number of rows by which the counts grow, 16 MB for Llama 3. The counts never shrink.
_STEP = 32


@dataclass(frozen=True, slots=True)
class CountedTokens:
    """The tokens of a batch that are counted, as int64 tensors on the device of the counts."""

    prompt_tokens: Tensor  # [n_prompt], indices in the batch
    prompt_rows: Tensor  # [n_prompt], rows of the counts
    generated_tokens: Tensor  # [n_generated], indices in the batch
    generated_rows: Tensor  # [n_generated], rows of the counts


class TokenCounts:
    """Counts the occurrences of tokens, in one row for each request with penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.tensor = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """The counts, [n_rows, vocab_size] int32. A count is the number of times that the token was
        generated, plus IN_PROMPT if the prompt contains the token."""
        self._free: list[int] = []  # a heap
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    @property
    def n_reserved(self) -> int:
        """Number of rows of the counts that are in use."""
        return len(self.tensor) - len(self._free)

    def reserve(self) -> int:
        """Reserves a row of the counts, filled with zeros, and returns its index."""
        if not self._free:
            n_rows = len(self.tensor)
            self._free = list(range(n_rows, n_rows + _STEP))
            self.tensor = torch.nn.functional.pad(self.tensor, (0, 0, 0, _STEP))
        row = heapq.heappop(self._free)
        self.tensor[row].zero_()
        return row

    def release(self, row: int) -> None:
        """Frees a row of the counts."""
        heapq.heappush(self._free, row)

    def add(self, token_ids: Tensor, counted: CountedTokens) -> None:
        """Counts the tokens that `counted` selects from a batch. `token_ids` [n_tokens] int64 are
        all tokens of the batch.

        Tokens of prompts get the bit IN_PROMPT. All tokens of a prompt must be added before the
        first generated token of the request.
        """
        counts, vocab_size = self.tensor.view(-1), self.tensor.shape[1]
        if len(counted.prompt_tokens):
            prompt = token_ids.index_select(0, counted.prompt_tokens)
            counts.index_fill_(0, counted.prompt_rows * vocab_size + prompt, IN_PROMPT)
        if len(counted.generated_tokens):
            generated = token_ids.index_select(0, counted.generated_tokens)
            places = counted.generated_rows * vocab_size + generated
            counts.scatter_add_(0, places, self._one.expand(len(places)))

    def add_stored(self, row: int, token_ids: Sequence[int], *, n_prompt: int) -> None:
        """Counts the tokens of a request that are already stored in shared K/V blocks. The first
        `n_prompt` of them belong to the prompt."""
        if not len(token_ids):
            return
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        if self.tensor.is_cuda:
            tokens = tokens.pin_memory().to(self.tensor.device, non_blocking=True)
        self.tensor[row].index_fill_(0, tokens[:n_prompt], IN_PROMPT)
        generated = tokens[n_prompt:]
        self.tensor[row].scatter_add_(0, generated, self._one.expand(len(generated)))
