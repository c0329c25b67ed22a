"""Makes the options of a gRPC request from names and values as in a body of the HTTP API."""

from typing import Any

from orcinus.v1 import inference_pb2

from services.common.sampling import OPTIONS


def generation_options(**given: Any) -> inference_pb2.GenerationOptions:
    # Words are texts for clients, as in a body.
    sampling = {name: given.pop(name) for name in OPTIONS if name in given and name != "bad_words"}
    if "logit_bias" in sampling:  # the names in JSON are texts
        sampling["logit_bias"] = {int(name): bias for name, bias in sampling["logit_bias"].items()}
    return inference_pb2.GenerationOptions(**given, sampling=sampling)
