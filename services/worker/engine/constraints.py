"""Limits the next token of requests whose allowed tokens depend on the output so far: requests that
follow a grammar, and requests with banned words.

Each of these requests has a matcher, an object that follows its output. Generated tokens are passed
to the matcher in order: the tokens that this rank has sampled and, for a request that is resumed
after a loss, the generated tokens that the plan contains. On a CPU sampled tokens are known at
once. On a GPU they arrive while the device computes the next iteration. `masks` waits for their
arrival; the host waits nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, cuda

from kernels.forms.sampling_columns import AllowedTokens
from kernels.upload import Uploads
from services.worker.engine.plan import Ints, PlanError


class Matcher(Protocol):
    """Follows one output, and tells which tokens the request's grammar or banned words allow next.

    For grammars, `services.grammar` implements this protocol, so the engine does not import
    llguidance. For banned words, `BadWordsMatcher` implements it.
    """

    def take(self, token_id: int) -> None:
        """Adds the next token to the output."""

    @property
    def is_cut(self) -> bool:
        """Whether the output must end here, because a step of the grammar takes too much work."""

    def mask(self) -> bytes:
        """Returns the tokens that may come next, as a bit mask: bit b of 32-bit word w is set if
        token 32 w + b is allowed."""


class Grammars(Protocol):
    """The compiled grammars of a model; implemented by `services.grammar.grammars.Grammars`."""

    def begin_iteration(self) -> None:
        """Resets the counter that limits the work of one iteration. Must be called before the masks
        of an iteration are made."""

    def matcher(self, digest: bytes) -> Matcher | None:
        """Returns a matcher of the grammar with this digest, at the beginning of an output. Returns
        None if the grammar is not compiled."""


class TokenArrival(Protocol):
    """Sampled tokens that are being copied from a device."""

    def wait(self) -> Sequence[int]:
        """Waits for the tokens and returns them."""


@dataclass(slots=True)
class _Constrained:
    """A request with a matcher, and the position of the next token that the matcher must take."""

    matcher: Matcher
    position: int


@dataclass(frozen=True, slots=True)
class ConstrainedRows:
    """The rows of a batch that have a matcher, which limits their next token."""

    places: Ints  # [n], indices among the batch's sampled tokens, in ascending order
    rows: Ints  # [n], rows of the request table
    positions: Ints  # [n], positions of the sampled tokens in their sequences
    held: tuple[_Constrained, ...]  # [n], the requests of the rows


class Constraints:
    """Keeps the matchers of an epoch's requests, by the requests' rows in the request table, and
    passes generated tokens to the matchers."""

    def __init__(self, grammars: Grammars | None) -> None:
        """`grammars` is None on ranks that do not sample, and for models that can follow no
        grammar."""
        self._grammars = grammars
        self._held: dict[int, _Constrained] = {}
        self._arriving: list[tuple[ConstrainedRows, TokenArrival]] = []

    def __bool__(self) -> bool:
        """Returns whether any request has a matcher."""
        return bool(self._held)

    def __contains__(self, row: int) -> bool:
        """Returns whether the request of a row has a matcher."""
        return row in self._held

    def admit(self, row: int, digest: bytes, *, n_prompt_tokens: int) -> None:
        """Adds a request whose output follows the grammar with this digest.

        Raises:
            PlanError: the model can follow no grammar, or this grammar is not compiled. A correct
                scheduler never admits such a request.
        """
        if self._grammars is None:
            raise PlanError(f"row {row} has a grammar, and this model can follow none")
        matcher = self._grammars.matcher(digest)
        if matcher is None:
            raise PlanError(f"row {row} has a grammar that is not compiled")
        self.hold(row, matcher, n_prompt_tokens=n_prompt_tokens)

    def hold(self, row: int, matcher: Matcher, *, n_prompt_tokens: int) -> None:
        """Adds a request whose `matcher` is at the beginning of the request's output."""
        self._held[row] = _Constrained(matcher, n_prompt_tokens)

    def release(self, row: int) -> None:
        """Forgets the request of a row, if it has a matcher."""
        self._held.pop(row, None)

    def take_sent(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Passes the tokens that a plan sends for a row to the row's matcher. The first token has
        the position `start` in the sequence. Tokens that the matcher has already taken are skipped.
        """
        held = self._held.get(row)
        if held is None:
            return
        for token_id in token_ids[max(held.position - start, 0) :]:
            held.matcher.take(token_id)
            held.position += 1

    def rows_of(self, rows: Ints, positions: Ints) -> ConstrainedRows | None:
        """Returns the rows of `rows` [n_sampled] that have a matcher, or None if there are none.
        `rows` are the sampled rows of a batch, and `positions` [n_sampled] are the positions of
        their next tokens."""
        if not self._held:
            return None
        places = np.array([i for i, row in enumerate(rows.tolist()) if row in self._held], np.int64)
        if not len(places):
            return None
        held = tuple(self._held[row] for row in rows[places].tolist())
        return ConstrainedRows(places, rows[places], positions[places], held)

    def masks(self, constrained: ConstrainedRows, uploads: Uploads) -> AllowedTokens:
        """Returns the tokens that may be sampled for the constrained rows. The tensors are readable
        after `uploads` has been flushed.

        Waits for sampled tokens that have not yet arrived from the device.
        """
        for rows, arrival in self._arriving:
            self._take_sampled(rows, arrival.wait())
        self._arriving.clear()
        if self._grammars is not None:
            self._grammars.begin_iteration()
        masks = [np.frombuffer(one.matcher.mask(), np.int32) for one in constrained.held]
        return AllowedTokens(
            rows=uploads.add(constrained.places), masks=uploads.add(np.stack(masks))
        )

    def cut(self, constrained: ConstrainedRows) -> list[int]:
        """Returns the indices of the sampled tokens whose outputs end early, because a step of the
        grammar takes too much work."""
        places = zip(constrained.places.tolist(), constrained.held, strict=True)
        return [place for place, one in places if one.matcher.is_cut]

    def sampled(self, constrained: ConstrainedRows, tokens: Ints | Tensor) -> None:
        """Passes the tokens sampled for a batch, [n_sampled], to the matchers of the constrained
        rows.

        Tokens on a device are passed later, when their copy has arrived on the host.
        """
        if isinstance(tokens, Tensor):
            self._arriving.append((constrained, _DeviceArrival(tokens)))
        else:
            self._take_sampled(constrained, tokens.tolist())

    def _take_sampled(self, constrained: ConstrainedRows, tokens: Sequence[int]) -> None:
        for place, position, held in zip(
            constrained.places.tolist(),
            constrained.positions.tolist(),
            constrained.held,
            strict=True,
        ):
            token_id = tokens[place]  # -1 stands for logits that are not finite: the request fails
            if held.position == position and token_id >= 0:
                held.matcher.take(token_id)
                held.position += 1


class _DeviceArrival:
    """A copy of sampled tokens from a GPU to the host, queued after the kernels that sample the
    tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._has_come = cuda.Event()  # type: ignore[no-untyped-call]
        self._has_come.record()

    def wait(self) -> Sequence[int]:
        self._has_come.synchronize()
        token_ids: list[int] = self._tokens.tolist()
        return token_ids
