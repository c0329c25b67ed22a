"""The form of receipts, and the schema in `docs` that is made from it."""

import json

import pytest
from pydantic import ValidationError

from services.common.sampling import OPTIONS
from services.receipts.receipt import HiddenPrompt, Receipt
from tests.receipts import schema_file
from tests.receipts.made import hidden, signed


def test_the_schema_is_as_it_would_be_written() -> None:
    found = schema_file.FILE.read_text(encoding="utf-8")
    assert found == schema_file.content(), f"`{schema_file.COMMAND}` writes it"


def test_a_receipt_has_all_options_that_decide_tokens() -> None:
    receipt = Receipt.model_validate_json(json.dumps(signed()))
    names = receipt.options.sampling.model_dump().keys()
    assert {*names, "seed"} == OPTIONS.keys()
    sampling = receipt.sampling
    assert (sampling.seed, sampling.logit_bias, sampling.bad_words) == (-5, ((7, 1.5),), ((8, 9),))


def test_a_hidden_prompt_is_known_by_its_tokens_alone() -> None:
    prompt = HiddenPrompt.model_validate(hidden([1, 2, 300_000]))
    assert prompt.is_of([1, 2, 300_000])
    assert not prompt.is_of([1, 2, 300_001])
    assert not prompt.is_of([1, 2])
    assert prompt.digest != hidden([1, 2, 300_000], salt="00" * 16)["digest"]


def test_types_are_not_converted() -> None:
    with pytest.raises(ValidationError, match="n_given"):
        Receipt.model_validate_json(json.dumps(signed(n_given="0")))
