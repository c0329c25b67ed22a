"""What is said of a receipt, by what a system computes. The system is made up: its tokens count up
from the last one of the prompt, the logit of a token is its number, and so is its text. The text of
a special token is only there if the request does not skip it."""

import json
from typing import Any

import grpc
import grpc.aio
import pytest
from orcinus.v1 import inference_pb2

from services.receipts.receipt import Arithmetic, Receipt
from services.verify.given import GivenReceipt, Unreadable, signature_of
from services.verify.receipt_files import FoundReceipt
from services.verify.recomputation import Recomputation
from services.verify.verdict import Outcome, Signature, Verdict
from tests.receipts.made import ARITHMETIC, KEYS, hidden, signed

VOCAB_SIZE, EOS = 100, 2
SPECIAL = 5


class Counting:
    """The stub of a system that counts."""

    def __init__(self, *, ends_at: int = 6, adapter: dict[str, str] | None = None) -> None:
        self.asked: list[inference_pb2.GenerateRequest] = []
        self._ends_at = ends_at
        self._adapter = adapter  # what its receipts say

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout: float,  # noqa: ASYNC109 - as a stub of gRPC has it
    ) -> inference_pb2.GenerateResponse:
        self.asked.append(request)
        prompt = list(request.prompt.token_ids.ids)
        if max(prompt) >= VOCAB_SIZE:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INVALID_ARGUMENT, nothing, nothing, "prompt: no such token"
            )
        choice = inference_pb2.Choice()
        if request.options.HasField("prompt_logprobs"):
            choice.prompt_logprobs.add(token_id=prompt[-1], logprob=float(prompt[-1]))
            return inference_pb2.GenerateResponse(choices=[choice])
        first = prompt[-1] + 1
        tokens = [*range(first, self._ends_at), EOS][: request.options.max_tokens]
        ends = [token for token in tokens if self._ends(token, request.options)]
        if ends:
            del tokens[tokens.index(ends[0]) + 1 :]
        choice.token_ids.extend(tokens)
        is_over = bool(ends) or tokens[-1:] == [EOS]
        choice.finish_reason = (
            inference_pb2.FINISH_REASON_STOP if is_over else inference_pb2.FINISH_REASON_LENGTH
        )
        if request.options.receipt:
            choice.receipt = json.dumps(signed(model={**MODEL, "adapter": self._adapter}))
        return inference_pb2.GenerateResponse(choices=[choice])

    @staticmethod
    def _ends(token: int, options: inference_pb2.GenerationOptions) -> bool:
        skips = options.skip_special_tokens or not options.HasField("skip_special_tokens")
        return str(token) in options.stop and not (token == SPECIAL and skips)


def found(**changes: Any) -> FoundReceipt:
    return FoundReceipt("file:1", json.loads(json.dumps(signed(**changes))))


async def verdict(stub: Counting | None = None, **changes: Any) -> Verdict:
    given = GivenReceipt.of(found(**changes), prompts=[[9], [1, 2, 3]])
    own = Receipt.model_validate_json(json.dumps(signed()))
    arithmetic = Arithmetic.model_validate(ARITHMETIC)
    system = Recomputation(stub or Counting(), "", own.model, arithmetic, frozenset([EOS]))
    return await system.verdict(given)


def options(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = signed()["options"]
    return {**made, **changes}


MODEL = signed()["model"]
SAME, DIFFERS, UNCHECKED = Outcome.SAME, Outcome.DIFFERS, Outcome.UNCHECKED
OTHER = {**ARITHMETIC, "kernels": "native-avx512"}


@pytest.mark.parametrize(
    ("changes", "outcome", "at", "gap"),
    [
        ({}, SAME, None, None),
        ({"prompt": hidden([1, 2, 3])}, SAME, None, None),
        ({"tokens": [4], "finish": "length", "options": options(max_tokens=1)}, SAME, None, None),
        ({"tokens": [4], "finish": "stop_text", "options": options(stop=["4"])}, SAME, None, None),
        (
            {"tokens": [4, 5], "finish": "stop_text", "options": options(stop=["5"])},
            SAME,
            None,
            None,
        ),
        ({"tokens": [4], "finish": "stop_text"}, DIFFERS, 1, None),
        ({"tokens": [], "finish": "stop_text"}, DIFFERS, 0, None),
        ({"options": options(stop=["4"])}, DIFFERS, 1, None),
        ({"tokens": [], "finish": "length", "options": options(max_tokens=0)}, SAME, None, None),
        ({"tokens": [4, 7, 2]}, DIFFERS, 1, -2.0),
        ({"tokens": [4, 1, 2]}, DIFFERS, 1, 4.0),
        ({"tokens": [4, VOCAB_SIZE, 2]}, DIFFERS, 1, None),
        ({"tokens": [4, 5]}, DIFFERS, 2, None),
        ({"tokens": [4, 5, 2, 7]}, DIFFERS, 3, None),
        ({"tokens": [4, 5], "finish": "length"}, DIFFERS, 2, None),
        ({"finish": "length"}, DIFFERS, 3, None),
        ({"prompt": {"tokens": [1, 2, 4]}}, DIFFERS, 0, 1.0),
        ({"prompt": {"tokens": [VOCAB_SIZE]}}, UNCHECKED, None, None),
        *(
            ({"model": {**MODEL, name: "e" * n_digits}}, UNCHECKED, None, None)
            for name, n_digits in (
                ("weights", 64),
                ("configuration", 16),
                ("tokenizer", 64),
                ("template", 64),
            )
        ),
        ({"arithmetic": [OTHER]}, SAME, None, None),
        ({"arithmetic": [OTHER], "tokens": [4, 7, 2]}, UNCHECKED, None, None),
        ({"arithmetic": [ARITHMETIC, OTHER], "tokens": [4, 7, 2]}, UNCHECKED, None, None),
        ({"arithmetic": [], "tokens": [4, 7, 2], "n_given": 3}, UNCHECKED, None, None),
    ],
    ids=str,
)
async def test_what_is_said_of_a_receipt(
    changes: dict[str, Any], outcome: Outcome, at: int | None, gap: float | None
) -> None:
    said = await verdict(**changes)
    assert (said.outcome, said.at, said.logit_gap) == (outcome, at, gap)
    assert bool(said.why) == (outcome is UNCHECKED or "arithmetic" in changes or said.why != "")
    assert said.why or outcome is not UNCHECKED


LAW = {"name": "law", "digest": "d" * 64}


@pytest.mark.parametrize(
    ("here", "outcome", "why"),
    [
        (LAW, SAME, ""),
        ({**LAW, "digest": "e" * 64}, UNCHECKED, "the adapter law is another one here"),
        (None, UNCHECKED, "law is no adapter here"),
    ],
    ids=["equal", "another", "none"],
)
async def test_an_adapter_is_asked_for_by_its_name_and_compared_by_its_digest(
    here: dict[str, str] | None, outcome: Outcome, why: str
) -> None:
    stub = Counting(adapter=here)
    said = await verdict(stub, model={**MODEL, "adapter": LAW})
    assert (said.outcome, said.why) == (outcome, why)
    assert {request.model for request in stub.asked} == {"law"}


async def test_the_system_is_asked_as_the_client_has_asked() -> None:
    stub = Counting()
    assert (await verdict(stub)).outcome is Outcome.SAME
    asked = stub.asked[0].options
    assert asked.max_tokens == 9
    assert (asked.sampling.seed, dict(asked.sampling.logit_bias)) == (-5, {7: 1.5})
    assert [list(word.token_ids) for word in asked.sampling.bad_words] == [[8, 9]]
    assert asked.ignore_eos  # the receipt's stop tokens lack the model's own
    assert list(asked.stop) == ["\n"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": [-1]}, "tokens.0"),
        ({"more": 1}, "more"),
        ({"version": 2}, "version"),
        ({"seed": "9" * 19}, "seed"),
        ({"seed": "five"}, "seed"),
        ({"options": options(max_tokens=-1)}, "options.max_tokens"),
        ({"options": options(sampling={"temperature": 3})}, "temperature"),
        ({"options": options(sampling={"unknown": 3})}, "options.sampling.unknown"),
        ({"prompt": hidden([1, 2])}, "digest of its prompt"),
        ({"finish": "stop_text", "options": options(stop=[])}, "options.stop is empty"),
        ({"n_given": 4}, "n_given: is 4"),
        ({"options": options(max_tokens=2)}, "options.max_tokens is 2"),
        ({"arithmetic": []}, "arithmetic: is empty"),
    ],
    ids=str,
)
def test_a_receipt_of_a_wrong_form_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Unreadable, match=field):
        GivenReceipt.of(found(**changes), prompts=[[1, 2, 3]])


def test_a_missing_receipt_has_no_signature() -> None:
    missing = FoundReceipt("file:1", {}, "line 1 has no receipt")
    with pytest.raises(Unreadable, match="line 1 has no receipt"):
        GivenReceipt.of(missing)
    assert signature_of(missing, KEYS.published) == (Signature.UNCHECKED, "")


def test_signatures_are_right_wrong_or_not_checked() -> None:
    good, bad = found(), found()
    bad.content["tokens"][0] += 1
    strange = FoundReceipt("", {**found().content, "key_id": "0" * 16})
    assert signature_of(good, KEYS.published) == (Signature.VALID, "")
    assert signature_of(good, None) == (Signature.UNCHECKED, "")
    assert signature_of(bad, KEYS.published)[0] is Signature.WRONG
    assert "0000 is not among the keys" in signature_of(strange, KEYS.published)[1]


def test_verdicts_are_said_in_words() -> None:
    plain = Verdict(place="f:1", outcome=SAME, signature=Signature.VALID)
    assert str(plain) == "f:1: same; signature valid"
    differs = Verdict(place="f:2", outcome=DIFFERS, at=7, logit_gap=0.25)
    assert str(differs) == "f:2: differs at token 7 by 0.25 in logits; signature not checked"
    assert differs.to_json()["at"] == 7
    unknown = Verdict(place="f", outcome=UNCHECKED, signature=Signature.WRONG, why="x: y")
    assert str(unknown) == "f: cannot be checked; SIGNATURE WRONG (x: y)"
