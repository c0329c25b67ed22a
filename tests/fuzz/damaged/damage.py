"""Ways to damage a checkpoint. Each way changes one thing, and returns a description of the
change."""

from collections.abc import Mapping
from random import Random

from tests.fuzz.damaged import file_damage as on_files
from tests.fuzz.damaged import gguf_damage as on_gguf
from tests.fuzz.damaged import tensor_damage as on_tensors
from tests.fuzz.damaged.file_damage import Damage
from tests.fuzz.damaged.originals import Files, Original

# Bytes of numbers that stay numbers, whose meaning for a quantised checkpoint has no oracle.
UNJUDGED = frozenset(("flip", "swap-tensors"))


DAMAGES: Mapping[str, Damage] = {
    "cut": on_files.cut,
    "lose": on_files.lose,
    "swap-files": on_files.swap_files,
    "add-bytes": on_files.add_bytes,
    "flip": on_files.flip,
    "config": on_files.json_of("config.json"),
    "swap-values": on_files.exchange_values,
    "generation": on_files.json_of("generation_config.json"),
    "tokenizer": on_files.json_of("tokenizer.json"),
    "tokenizer-config": on_files.json_of("tokenizer_config.json"),
    "tekken": on_files.json_of("tekken.json"),
    "words": on_files.json_of("vocab.json"),
    "index": on_files.json_of(on_files.INDEX),
    "wrong-index": on_files.wrong_index,
    "lose-tensor": on_tensors.of_tensors(on_tensors.lose_tensor),
    "rename-tensor": on_tensors.of_tensors(on_tensors.rename_tensor),
    "copy-tensor": on_tensors.of_tensors(on_tensors.copy_tensor),
    "reshape": on_tensors.of_tensors(on_tensors.reshape),
    "resize": on_tensors.of_tensors(on_tensors.resize),
    "retype": on_tensors.of_tensors(on_tensors.retype),
    "swap-tensors": on_tensors.of_tensors(on_tensors.swap_tensors),
    "spoil": on_tensors.of_tensors(on_tensors.spoil),
    "lying-header": on_tensors.lying_header,
    "huge-header": on_tensors.huge_header,
    "duplicate": on_tensors.duplicate,
    "gguf-value": on_gguf.of_gguf(on_gguf.change_value),
    "gguf-lose-value": on_gguf.of_gguf(on_gguf.lose_value),
    "gguf-repeat": on_gguf.of_gguf(on_gguf.repeat_value),
    "gguf-swap": on_gguf.of_gguf(on_gguf.swap_values),
    "gguf-place": on_gguf.of_gguf(on_gguf.lying_place),
    "gguf-count": on_gguf.of_gguf(on_gguf.lying_count),
    "gguf-data": on_gguf.of_gguf(on_gguf.lying_data),
}


def damaged(original: Original, dice: Random) -> tuple[str, Files]:
    """Returns a description of the damage, and the damaged files."""
    while True:
        name = dice.choice(sorted(DAMAGES))
        files = dict(original.files)
        if original.plain is None or name not in UNJUDGED:
            said = DAMAGES[name](files, dice)
            if said is not None:
                return f"{name}: {said}", files
