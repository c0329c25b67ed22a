"""A receipt of the right form, together with the tokens of its prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.receipts.canonical_json import canonical_json
from services.receipts.keys import PublicKeys
from services.receipts.receipt import HiddenPrompt, Receipt
from services.verify.receipt_files import FoundReceipt
from services.verify.verdict import Signature

Prompts = Iterable[Sequence[int]]
"""Prompts, as lists of tokens. If a receipt has only the digest of its prompt, the prompt is
searched among these."""


class Unreadable(Exception):
    """A receipt cannot be checked by any system. The message says why."""


@dataclass(frozen=True, slots=True)
class GivenReceipt:
    """A receipt and the tokens of its prompt."""

    place: str
    receipt: Receipt
    prompt: Sequence[int]

    @classmethod
    def of(cls, found: FoundReceipt, prompts: Prompts = ()) -> "GivenReceipt":
        """Returns a found receipt with the tokens of its prompt. If the receipt has only a digest
        of its prompt, the prompt is searched in `prompts`.

        Raises:
            Unreadable: the receipt is missing, has a wrong form or contradicts itself, or none of
                `prompts` has its digest.
        """
        if found.complaint:
            raise Unreadable(found.complaint)
        try:
            receipt = Receipt.model_validate_json(canonical_json(found.content))
            receipt.sampling.check(own_stop_token_ids=receipt.options.sampling.stop_token_ids)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "receipt"
            raise Unreadable(f"{field}: {first['msg']}") from error
        except (InvalidRequest, ValueError) as error:
            raise Unreadable(str(error)) from error
        if why := _contradiction(receipt):
            raise Unreadable(why)
        return cls(found.place, receipt, _prompt_of(receipt, prompts))


def signature_of(found: FoundReceipt, keys: PublicKeys | None) -> tuple[Signature, str]:
    """Returns whether the signature of a receipt is right, and the reason if it is wrong. If `keys`
    is None, or there is no receipt, the signature is unchecked."""
    if keys is None or found.complaint:
        return Signature.UNCHECKED, ""
    name = str(found.content.get("key_id"))
    if name not in keys.by_id:
        return Signature.WRONG, f"the key {name} is not among the keys"
    if keys.has_signed(found.content):
        return Signature.VALID, ""
    return Signature.WRONG, "the receipt is not as it was signed"


def _contradiction(receipt: Receipt) -> str:
    """Returns a text about fields of a receipt that contradict each other, such as more tokens than
    `max_tokens` allows. The text is empty if there is no contradiction."""
    n_tokens, options = len(receipt.tokens), receipt.options
    if n_tokens > options.max_tokens:
        return f"tokens: there are {n_tokens}, and options.max_tokens is {options.max_tokens}"
    if receipt.n_given > n_tokens:
        return f"n_given: is {receipt.n_given}, and there are {n_tokens} tokens"
    if receipt.finish == "stop_text" and not options.stop:
        return "finish: is stop_text, and options.stop is empty"
    if not receipt.arithmetic and receipt.n_given < n_tokens:
        return "arithmetic: is empty, and n_given is less than the number of tokens"
    return ""


def _prompt_of(receipt: Receipt, prompts: Prompts) -> Sequence[int]:
    if not isinstance(receipt.prompt, HiddenPrompt):
        return receipt.prompt.tokens
    for prompt in prompts:
        if receipt.prompt.is_of(prompt):
            return prompt
    raise Unreadable("the receipt has only a digest of its prompt, and no given prompt has it")
