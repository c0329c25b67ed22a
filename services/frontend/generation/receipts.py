"""Makes the receipts of answers.

The digests of a model's tokenizer and templates are computed once, when the frontend starts. The
scheduler reports the traits of the workers, which say what they computed with, before the first
token of each answer. A receipt is made and signed when its answer ends, or, with `best_of`, when
the answers that are returned are known.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.errors import InvalidRequest, Unavailable
from services.frontend.generation.answer import Answer, Piece
from services.frontend.generation.answers import Answers
from services.frontend.generation.missing_receipts import MissingReceipts
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.pipeline import ServedPipeline, Traits
from services.receipts.canonical_json import canonical_json
from services.receipts.key_file import KeyFile
from services.receipts.receipt import (
    TYPE,
    VERSION,
    Arithmetic,
    prompt_digest,
    sampling_record,
)

FIELD = "receipt"
"""Name of the field by which clients ask for receipts."""

SALT_BYTES = 16
"""Number of random bytes in the salt of a prompt's digest."""

TOKEN_BYTES = 16
"""Memory of a token in a receipt, in bytes: as a number, and as text in the answer."""


Keep = Callable[[int], None]
"""Type of a function that reserves a number of bytes, for a call, in the memory budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptIssuer:
    """Holds the settings of receipts, and the facts about a model that all its receipts contain."""

    keys: KeyFile
    tokenizer: str
    """Digest of the tokenizer."""
    template: str | None
    """Digest of the chat templates, or None if there are none."""
    are_always_made: bool = False
    """Whether answers have receipts also if the request does not ask for them."""
    hide_prompts: bool = False
    """Whether receipts have a digest of the prompt instead of its tokens."""

    missing: MissingReceipts = field(default_factory=MissingReceipts)
    """Log of the answers without receipts."""

    def can_serve(self, pipeline: ServedPipeline, *, is_optional: bool) -> bool:
        """Returns whether the workers of a pipeline report the traits that receipts need: the model
        and the arithmetic that they compute with. `is_optional` says that the client has not asked
        for receipts.

        Raises:
            InvalidRequest: `is_optional` is false, and the workers do not report these traits.
        """
        if tells_enough(pipeline.traits):
            return True
        why = "the workers run without the setting `receipts`"
        if not is_optional:
            raise InvalidRequest(FIELD, f"cannot be made: {why}")
        self.missing.note(pipeline, why)
        return False


class CallReceipts:
    """Makes the receipts of the answers of one call."""

    __slots__ = (
        "_answers",
        "_is_optional",
        "_issuer",
        "_keep",
        "_model",
        "_pipeline",
        "_request_id",
        "_traits",
    )

    def __init__(
        self,
        issuer: ReceiptIssuer,
        answers: Answers,
        *,
        request_id: str,
        model: str,
        pipeline: ServedPipeline,
        keep: Keep,
        is_optional: bool = False,
    ) -> None:
        """`keep` is called with a number of bytes to count memory for receipts. `is_optional` says
        that an answer is returned without a receipt if none can be made."""
        self._keep = keep
        self._is_optional = is_optional
        self._issuer = issuer
        self._answers = answers
        self._request_id = request_id
        self._model = model
        self._pipeline = pipeline
        self._traits: dict[int, list[Traits]] = {}  # of each answer, in order

    def note_traits(self, index: int, traits: Mapping[str, str]) -> None:
        """Notes the traits of the workers that make the next tokens of an answer: the model and the
        arithmetic that they compute with."""
        found = self._traits.setdefault(index, [])
        sorted_traits = tuple(sorted(traits.items()))
        if sorted_traits not in found[-1:]:
            found.append(sorted_traits)

    def with_receipt(self, answer: Answer, last: Piece) -> Piece:
        """Returns the last piece of an answer with the receipt of the answer. Returns the piece as
        it is if no receipt can be made and the client has not asked for one.

        Raises:
            PoolFull: there is no memory for the receipt.
            Unavailable: the client has asked for a receipt, but none can be made.
        """
        if why := self._obstacle(answer):
            if not self._is_optional:
                raise Unavailable(f"{why}; try again")
            self._issuer.missing.note(self._pipeline, why)
            return last
        n_tokens = len(self._answers.prompt(answer.index).token_ids) + answer.n_tokens
        self._keep(TOKEN_BYTES * n_tokens)
        return replace(last, receipt=self._of(answer, last))

    def _obstacle(self, answer: Answer) -> str:
        """Returns the reason why no receipt of an answer can be made. Either some of its tokens
        come from workers that do not report the traits that receipts need, or its tokens come from
        workers with different models. The result is empty if a receipt can be made."""
        builds = self._traits.get(answer.index, [])
        has_computed = answer.n_tokens > len(self._answers.tokens_so_far(answer.index))
        if not all(map(tells_enough, builds)) or (has_computed and not builds):
            return "workers without the setting `receipts` made the answer"
        if len(set(map(model_of, builds))) > 1:
            return "workers with different models made the answer"
        return ""

    def _of(self, answer: Answer, last: Piece) -> dict[str, Any]:
        index, prompt = answer.index, self._answers.prompt(answer.index)
        sampling = self._answers.sampling(index)
        builds = self._traits.get(index, [])
        traits = dict(builds[0] if builds else self._pipeline.traits)
        return self._issuer.keys.latest.signed(
            {
                "type": TYPE,
                "version": VERSION,
                "id": f"{self._request_id}-{index}",
                "model": {
                    "name": self._model,
                    "weights": traits.get("weights", ""),
                    "configuration": traits.get("configuration", ""),
                    "max_model_len": int(traits["max_model_len"]),
                    "tokenizer": self._issuer.tokenizer,
                    "template": self._issuer.template,
                    "adapter": self._adapter(),
                },
                "arithmetic": [arithmetic_of(one) for one in builds],
                "prompt": self._prompt(prompt.token_ids),
                "options": {
                    "max_tokens": prompt.max_new_tokens,
                    "stop": list(self._answers.stop),
                    "sampling": sampling_record(sampling),
                },
                "seed": str(sampling.seed),
                "tokens": answer.kept_tokens,
                "n_given": len(self._answers.tokens_so_far(index)),
                "finish": _finish(answer, last),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )

    def _adapter(self) -> dict[str, str] | None:
        adapter = self._answers.adapter
        return None if adapter is None else {"name": adapter.name, "digest": adapter.digest}

    def _prompt(self, token_ids: Sequence[int]) -> dict[str, object]:
        if not self._issuer.hide_prompts:
            return {"tokens": list(token_ids)}
        salt = secrets.token_hex(SALT_BYTES)
        digest = prompt_digest(salt, token_ids)
        return {"digest": digest, "salt": salt, "n_tokens": len(token_ids)}


MakeReceipts = Callable[[Answers, str, Keep], CallReceipts]
"""Type of a function that returns the receipts of a call, given the call's answers, its request id,
and the function that counts memory."""


def tells_enough(traits: Traits) -> bool:
    """Returns whether `traits` has the entries that receipts need: `weights` and `max_model_len`.
    Traits are what workers report about their model and their arithmetic."""
    return {"weights", "max_model_len"} <= dict(traits).keys()


def model_of(traits: Traits) -> tuple[str, ...]:
    """Returns the digests of the weights and of the configuration from the traits that workers
    report. Both must be equal for all tokens of an answer."""
    by_name = dict(traits)
    return tuple(by_name.get(name, "") for name in ("weights", "configuration"))


def arithmetic_of(traits: Traits) -> dict[str, str]:
    """Returns the traits that decide how numbers are rounded. `traits` are all traits that workers
    report about their model and their arithmetic."""
    by_name = dict(traits)
    found = {name: by_name.get(name, "") for name in Arithmetic.model_fields}
    return {name: value for name, value in found.items() if value or name != "adapters"}


def receipt_json(receipt: Mapping[str, Any] | None) -> str:
    """Returns a receipt as canonical JSON. The result is empty if there is no receipt."""
    return "" if receipt is None else canonical_json(receipt).decode()


def _finish(answer: Answer, last: Piece) -> str:
    if answer.stop_met:
        return "stop_text"
    return "length" if last.finish_reason is FinishReason.LENGTH else "stop"
