"""OpenVINO GenAI's continuous batching, stepped in process.

A checkpoint is converted once, into the folder `--converted`. Its weights keep their type or, with
`--weights`, become integers of that number of bits. The precision of the computation is chosen when
the model is loaded. Batches mix prompts and decodes ("dynamic split fuse"), up to a limit of
tokens. Prefixes are not cached, since every round repeats the prompts.
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
import openvino_genai
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

from benchmarks.peers.protocol import Pipe, TokenIds, adapter_options, serve

PRECISIONS = {"bf16": "bf16", "fp32": "f32"}
MODES = {
    "int8": nncf.CompressWeightsMode.INT8_ASYM,
    "int4": nncf.CompressWeightsMode.INT4_ASYM,
}
KV_GB = 2


class OpenVinoEngine:
    """OpenVINO's pipeline, and its unfinished requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        packages = ("openvino", "openvino-genai", "optimum-intel")
        self.versions = {name: version(name) for name in packages}
        precision = PRECISIONS[options.dtype]
        self.settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": options.threads,
        }
        about = {"weights": options.weights or "as they are"}
        if options.dtype == "fp32":
            self.settings["KV_CACHE_PRECISION"] = precision
        scheduling = {
            "max_num_seqs": options.max_batch_size,
            "max_num_batched_tokens": options.max_batch_tokens,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": False,
            "cache_size": KV_GB,
        }
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in scheduling.items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(converted(options.model, options.converted, options.weights)),
            scheduler,
            "CPU",
            self.settings,
        )
        self.settings = self.settings | scheduling | about
        self._handles: dict[int, Any] = {}

    def submit(self, index: int, prompt_token_ids: TokenIds, n_output: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = n_output
        config.ignore_eos = True
        prompt = openvino.Tensor(np.array([prompt_token_ids], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(index, prompt, config)

    def step(self) -> dict[int, TokenIds]:
        self._pipeline.step()
        news = {}
        for index, handle in list(self._handles.items()):
            if handle.can_read():
                (output,) = handle.read().values()
                news[index] = output.generated_ids
            elif handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._handles[index]
        return news


def converted(model: Path, folder: Path, weights: str | None) -> Path:
    """Returns the folder of the model in OpenVINO's format. If the file is missing there, first
    converts the model."""
    folder = folder / weights if weights else folder
    path = folder / "openvino_model.xml"
    if not path.exists():
        config = OVConfig(dtype="fp32")
        main_export(str(model), output=folder, task="text-generation-with-past", ov_config=config)
        if weights:
            plain = openvino.Core().read_model(path)
            compressed = nncf.compress_weights(plain.clone(), mode=MODES[weights])
            del plain  # it keeps the file open that is written next
            openvino.save_model(compressed, path.with_name("compressed.xml"))
            for suffix in (".xml", ".bin"):
                path.with_name(f"compressed{suffix}").replace(path.with_suffix(suffix))
    return folder


def main() -> None:
    parser = adapter_options(__doc__, dtypes=PRECISIONS)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--weights", choices=sorted(MODES), help="integers of so many bits")
    pipe = Pipe()
    serve(pipe, OpenVinoEngine(parser.parse_args()))


if __name__ == "__main__":
    main()
