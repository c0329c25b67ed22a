"""A receipt for tests."""

from typing import Any

from services.common.sampling import SamplingParams
from services.receipts.keys import SigningKeys, new_key
from services.receipts.receipt import prompt_digest, sampling_record

KEYS = SigningKeys.parse(new_key())
ARITHMETIC = {
    "kernels": "native-avx2",
    "dtype": "float32",
    "quantization": "none",
    "activations": "rounded",
    "tp_size": "1",
    "code": "c" * 16,
    "torch": "2.13.0",
}


def unsigned(**changes: Any) -> dict[str, Any]:
    """Returns the fields of a receipt without those of the signature."""
    sampling = SamplingParams(temperature=0.7, seed=-5, logit_bias=((7, 1.5),), bad_words=((8, 9),))
    record = sampling_record(sampling)
    return {
        "type": "orcinus.receipt",
        "version": 1,
        "id": "6ad0-0",
        "model": {
            "name": "demo",
            "weights": "a" * 64,
            "configuration": "b" * 16,
            "max_model_len": 256,
            "tokenizer": "c" * 64,
            "template": None,
            "adapter": None,
        },
        "arithmetic": [ARITHMETIC],
        "prompt": {"tokens": [1, 2, 3]},
        "options": {"max_tokens": 9, "stop": ["\n"], "sampling": record},
        "seed": str(sampling.seed),
        "tokens": [4, 5, 2],
        "n_given": 0,
        "finish": "stop",
        "time": "2026-11-29T23:00:00Z",
        **changes,
    }


def signed(**changes: Any) -> dict[str, Any]:
    """Returns a receipt that is signed by `KEYS`, as a client reads it."""
    return KEYS.signed(unsigned(**changes))


def hidden(tokens: list[int], salt: str = "0f" * 16) -> dict[str, Any]:
    """Returns a prompt's record with a digest in place of its tokens."""
    return {"digest": prompt_digest(salt, tokens), "salt": salt, "n_tokens": len(tokens)}
