"""`sentence-transformers` on PyTorch: `encode` of a list of texts.

The adapter speaks the protocol of `benchmarks.peers.protocol`, with other messages:

    benchmark  {"texts": ["...", ...]}
    adapter    {"seconds": 0.1, "vectors": [[...], ...]}

`seconds` is the time of the call, with tokenizing. `vectors` has the embedding of each text. The
model's files decide whether embeddings have length 1.
"""

import time
from importlib.metadata import version
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.peers.protocol import Pipe, adapter_options

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    options = adapter_options(__doc__, dtypes=DTYPES).parse_args()
    pipe = Pipe()
    torch.set_num_threads(options.threads)
    model: Any = SentenceTransformer(
        str(options.model), device="cpu", model_kwargs={"dtype": DTYPES[options.dtype]}
    )
    names = ("sentence-transformers", "transformers", "torch")
    settings = {"dtype": options.dtype, "batch_size": options.max_batch_size}
    versions = {name: version(name) for name in names}
    pipe.say({"ready": {"versions": versions, "settings": settings}})
    while (message := pipe.listen()) is not None:
        start_s = time.perf_counter()
        vectors = model.encode(
            message["texts"], batch_size=options.max_batch_size, show_progress_bar=False
        )
        seconds = time.perf_counter() - start_s
        pipe.say({"seconds": seconds, "vectors": vectors.tolist()})


if __name__ == "__main__":
    main()
