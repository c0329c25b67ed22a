"""Converts checkpoints to GGUF with llama.cpp's own converter, whose source is `SOURCE`.

    python convert_with_llama_cpp.py SOURCE CHECKPOINTS OUT

It runs in a process of its own, since the source brings a version of the package `gguf`. The
checkpoints have no tokenizers, so vocabularies are left out.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

# A vocabulary of 199 tokens, of which Gemma's converter only takes the number.
TOKENIZER = {"model": {"vocab": {str(i): i for i in range(199)}}, "added_tokens": []}
# Keys that published files have, and `transformers` does not write.
MORE = {"Cohere2ForCausalLM": {"rotary_pct": 1.0}, "GPT2LMHeadModel": {"n_ctx": 64}}


def without_vocabulary(self: Any) -> None:
    """Stands in for `set_vocab` of a converter."""


def convert(directory: Path, out: Path) -> None:
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | MORE.get(config["architectures"][0], {})))
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with torch.inference_mode():
        said = ModelBase.load_hparams(directory, False)
        converter = get_model_class(get_model_architecture(said, ModelType.TEXT))
        converter.set_vocab = without_vocabulary
        converter.no_mtp = True
        model = converter(directory, gguf.LlamaFileType.ALL_F32, out)
        if hasattr(model, "impl"):
            type(model.impl).set_vocab = without_vocabulary
        model.write()


if __name__ == "__main__":
    source, checkpoints, folder = map(Path, sys.argv[1:])
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    logging.disable(logging.WARNING)
    for each in sorted(checkpoints.iterdir()):
        convert(each, folder / f"{each.name}.gguf")
