"""The settings of bitsandbytes: NF4 or FP4 with a scale for each block of numbers, or int8 with a
scale for each row.

The weight files say which modules are quantised, and how large the blocks are.
"""

from __future__ import annotations

from typing import Literal

from services.worker.models.quantization_config.settings import Method
from services.worker.models.weight_format import MatrixFormat, WeightFormat

_NOTE = (
    "bitsandbytes' numbers of four bits are dequantised, so that no weight changes; "
    "--quantization int8 keeps them in four bits, with each value rounded to 1/127"
)


class BitsAndBytes(Method):
    """The settings of bitsandbytes."""

    ignored = frozenset((
        "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
        "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold",
        "modules_to_not_convert",
    ))  # fmt: skip

    quant_method: Literal["bitsandbytes"] = "bitsandbytes"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"

    def weight_format(self) -> WeightFormat:
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError("load_in_4bit or load_in_8bit must be true, and not both")
        if self.load_in_8bit:
            return WeightFormat((MatrixFormat(layout="int8_rows", bits=8, block=(1, None)),))
        form = MatrixFormat(layout="blockwise", bits=4, block=(1, None))
        return WeightFormat((form,), notes=(_NOTE,))
