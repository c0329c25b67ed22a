"""The settings of FP8 in three variants: with a scale for each block of a matrix (DeepSeek, Qwen),
with one scale for the whole matrix (AutoFP8), or with a scale for each output (FBGEMM)."""

from __future__ import annotations

from typing import Any, Literal

from services.worker.models.config import UnsupportedModel
from services.worker.models.quantization_config.settings import KV_NOTE, Method, Names, Sizes
from services.worker.models.weight_format import MatrixFormat, WeightFormat


class Fp8(Method):
    """The settings of FP8 with a scale for each block of a matrix, or one for the whole matrix."""

    # Settings of activations, and how scales were rounded before storing in float32.
    ignored = frozenset(("activation_scheme", "dequantize"))

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    weight_block_size: Sizes | None = None
    modules_to_not_convert: Names = ()
    ignored_layers: Names = ()
    scale_fmt: Literal["float", "ue8m0"] = "float"
    kv_cache_scheme: Any = None

    def weight_format(self) -> WeightFormat:
        block = self.weight_block_size
        if block is not None and min(block) < 1:
            raise UnsupportedModel(
                f"config.json: quantization_config.weight_block_size {list(block)} is no size"
            )
        form = MatrixFormat(
            layout="scaled",
            bits=8,
            is_float=True,
            block=block or (None, None),
            scale_name="weight_scale" if block is None else "weight_scale_inv",
        )
        notes = (KV_NOTE,) if self.kv_cache_scheme else ()
        return WeightFormat((form,), (*self.modules_to_not_convert, *self.ignored_layers), notes)


class FbgemmFp8(Method):
    """The settings of FP8 with a scale for each output, as FBGEMM writes them."""

    ignored = frozenset(("activation_scale_ub",))

    quant_method: Literal["fbgemm_fp8"]
    modules_to_not_convert: Names = ()

    def weight_format(self) -> WeightFormat:
        form = MatrixFormat(layout="scaled", bits=8, block=(1, None), is_float=True)
        return WeightFormat((form,), self.modules_to_not_convert)
