"""Computes the answers of receipts again, with a system that serves the same model.

For each receipt, the system gets the tokens of the prompt, the options, the seed and the texts that
end the answer. The system looks for these texts in the text of the answer. A receipt does not say
whether that text contained special tokens, so both ways are tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from orcinus.v1 import inference_pb2, inference_pb2_grpc

from services.common.sampling_proto import to_proto
from services.receipts.receipt import Arithmetic, ModelRecord, Receipt
from services.verify.given import GivenReceipt
from services.verify.verdict import Outcome, Verdict

EXACT_KERNELS = "native-"
"""Beginning of the names of kernels that promise equal tokens in batches of any size."""

ANSWER_TIMEOUT_S = 3600.0
"""Timeout in seconds for an answer, longer than any answer takes. After this time the check
fails."""

_FINISHES = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "stop_text": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
}

_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
)
"""Statuses with which a system refuses a request that it cannot compute."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Computes answers again with one system."""

    stub: Any
    name: str
    """Name of the model in the system's API. Empty if the system serves only one model."""
    model: ModelRecord
    """The system's model, as stated in a receipt that the system has made."""
    arithmetic: Arithmetic
    """The system's arithmetic, as stated in a receipt that the system has made."""
    eos_token_ids: frozenset[int]

    @classmethod
    async def of(cls, channel: grpc.aio.Channel, name: str = "") -> Self:
        """Requests a description of the model and one answer with a receipt from a system. The
        receipt states the system's model and arithmetic.

        Raises:
            grpc.aio.AioRpcError: the system does not respond, or makes no receipts.
        """
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.DescribeModelRequest(model=name)
        described = await stub.DescribeModel(request, timeout=ANSWER_TIMEOUT_S)
        asked = _request([0], inference_pb2.GenerationOptions(max_tokens=1, receipt=True), name)
        answer = await stub.Generate(asked, timeout=ANSWER_TIMEOUT_S)
        own = Receipt.model_validate_json(answer.choices[0].receipt)
        return cls(stub, name, own.model, own.arithmetic[0], frozenset(described.eos_token_ids))

    async def verdict(self, given: GivenReceipt) -> Verdict:
        """Computes the answer of a receipt again, and returns the verdict, which says whether the
        tokens are the same.

        Raises:
            grpc.aio.AioRpcError: the system does not respond.
        """
        if why := self._other_model(given.receipt):
            return Verdict(place=given.place, outcome=Outcome.UNCHECKED, why=why)
        try:
            answer = await self._computed(given)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                raise
            why = f"the system refuses the request: {error.details()}"
            return Verdict(place=given.place, outcome=Outcome.UNCHECKED, why=why)
        if why := _other_adapter(given.receipt, answer):
            return Verdict(place=given.place, outcome=Outcome.UNCHECKED, why=why)
        return await self._compared(given, answer)

    async def _computed(self, given: GivenReceipt) -> inference_pb2.Choice:
        """Returns the system's answer to the request of a receipt. If the request has stop strings
        and the answer's tokens differ from the receipt's, the request is repeated with special
        tokens in the answer's text, and the second answer is returned."""
        request = self._asked(given)
        answer: inference_pb2.Choice = (
            await self.stub.Generate(request, timeout=ANSWER_TIMEOUT_S)
        ).choices[0]
        if request.options.stop and list(answer.token_ids) != given.receipt.tokens:
            request.options.skip_special_tokens = False
            answer = (await self.stub.Generate(request, timeout=ANSWER_TIMEOUT_S)).choices[0]
        return answer

    def _other_model(self, receipt: Receipt) -> str:
        """Returns a text that names the digests in which the system's model differs from the model
        of a receipt. The text is empty if all digests are equal."""
        names = ("weights", "configuration", "tokenizer", "template")
        others = [
            name for name in names if getattr(receipt.model, name) != getattr(self.model, name)
        ]
        return f"other digests here: {', '.join(others)}" if others else ""

    def _asked(self, given: GivenReceipt) -> inference_pb2.GenerateRequest:
        receipt = given.receipt
        sampling = to_proto(receipt.sampling)
        ignores_eos = not self.eos_token_ids.issubset(receipt.options.sampling.stop_token_ids)
        options = inference_pb2.GenerationOptions(
            max_tokens=receipt.options.max_tokens,
            stop=receipt.options.stop,
            sampling=sampling,
            return_token_ids=True,
            ignore_eos=ignores_eos,
            receipt=receipt.model.adapter is not None,  # it has the digest of the adapter here
        )
        return _request(given.prompt, options, self._name_for(receipt))

    def _name_for(self, receipt: Receipt) -> str:
        """Returns the model name for the request of a receipt's answer: the name of the adapter, or
        the name of the model if there is no adapter."""
        adapter = receipt.model.adapter
        return self.name if adapter is None else adapter.name

    async def _compared(self, given: GivenReceipt, answer: inference_pb2.Choice) -> Verdict:
        receipt, computed = given.receipt, list(answer.token_ids)
        why = self._other_arithmetic(receipt)
        at = _first_difference(receipt.tokens, computed)
        ends_alike = answer.finish_reason == _FINISHES[receipt.finish]
        if at is None and ends_alike:
            note = f"although {why}" if why else ""
            return Verdict(place=given.place, outcome=Outcome.SAME, why=note)
        if why:
            return Verdict(place=given.place, outcome=Outcome.UNCHECKED, why=why)
        if at is None:
            why = f"it ended by {receipt.finish}, and does not here"
            return Verdict(place=given.place, outcome=Outcome.DIFFERS, at=len(computed), why=why)
        gap = await self._gap(given, computed, at)
        return Verdict(place=given.place, outcome=Outcome.DIFFERS, at=at, logit_gap=gap)

    def _other_arithmetic(self, receipt: Receipt) -> str:
        """Returns the reason why the system's tokens may differ from the tokens of a receipt. The
        result is empty if they must be equal."""
        if len(receipt.arithmetic) != 1:
            n_builds = len(receipt.arithmetic) or "no known"
            return f"{n_builds} builds of the workers made the answer"
        (made,) = receipt.arithmetic
        if made != self.arithmetic:
            return "the arithmetic is another: " + _changes(made, self.arithmetic)
        if not made.kernels.startswith(EXACT_KERNELS):
            return f"the kernels {made.kernels} do not promise equal tokens"
        return ""

    async def _gap(self, given: GivenReceipt, computed: Sequence[int], at: int) -> float | None:
        """Compares the two tokens at the index `at`: returns the logit of the token in `computed`
        minus the logit of the receipt's token. Returns None if one of the answers has no token
        there, or if the system returns no log-probability."""
        told = given.receipt.tokens
        if at >= min(len(told), len(computed)):
            return None
        before = [*given.prompt, *computed[:at]]
        try:
            name = self._name_for(given.receipt)
            told_logprob = await self._logprob([*before, told[at]], name)
            return await self._logprob([*before, computed[at]], name) - told_logprob
        except grpc.aio.AioRpcError:  # such as a token outside the vocabulary
            return None

    async def _logprob(self, tokens: Sequence[int], name: str) -> float:
        """Returns the log-probability of the last token after the preceding tokens, by the model or
        adapter `name`. At one position, the difference between two log-probabilities is the
        difference between the logits."""
        options = inference_pb2.GenerationOptions(max_tokens=0, prompt_logprobs=0)
        answer = await self.stub.Generate(_request(tokens, options, name), timeout=ANSWER_TIMEOUT_S)
        return float(answer.choices[0].prompt_logprobs[-1].logprob)


def _other_adapter(receipt: Receipt, answer: inference_pb2.Choice) -> str:
    """Returns the reason why the adapter of `answer` is not the adapter of a receipt. The result is
    empty if it is the same adapter, or if the receipt has no adapter."""
    adapter = receipt.model.adapter
    if adapter is None:
        return ""
    here = Receipt.model_validate_json(answer.receipt).model.adapter
    if here is None:
        return f"{adapter.name} is no adapter here"
    return "" if here.digest == adapter.digest else f"the adapter {here.name} is another one here"


def _request(
    tokens: Sequence[int], options: inference_pb2.GenerationOptions, name: str
) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=tokens))
    return inference_pb2.GenerateRequest(model=name, prompt=prompt, options=options)


def _first_difference(told: Sequence[int], computed: Sequence[int]) -> int | None:
    """Returns the index of the first token that differs, or that only the longer answer has.
    Returns None if the answers are equal."""
    for at, (mine, its) in enumerate(zip(told, computed, strict=False)):
        if mine != its:
            return at
    return None if len(told) == len(computed) else min(len(told), len(computed))


def _changes(made: Arithmetic, here: Arithmetic) -> str:
    return ", ".join(
        f"{name} {getattr(made, name)}, here {getattr(here, name)}"
        for name in type(made).model_fields
        if getattr(made, name) != getattr(here, name)
    )
