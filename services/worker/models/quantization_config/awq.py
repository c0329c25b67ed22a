"""The settings of AWQ, as AutoAWQ writes them for its version "gemm"."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from services.worker.models.config import MAX_SIZE, JsonObject
from services.worker.models.quantization_config.gptq import AUTO_ROUND, LISTS, QUANTISING
from services.worker.models.quantization_config.settings import Method, Names, inputs_of_group
from services.worker.models.weight_format import MatrixFormat, WeightFormat


class Awq(Method):
    """The settings of AWQ."""

    ignored = (
        QUANTISING | AUTO_ROUND | LISTS | {"desc_act", "fuse_max_seq_len", "modules_to_fuse", "sym"}
    )

    quant_method: Literal["awq"]
    method: Literal["awq"] = "awq"
    bits: Literal[4] = 4
    group_size: int = Field(default=128, ge=-1, le=MAX_SIZE)
    zero_point: bool = True
    version: Literal["gemm", "GEMM"] = "gemm"
    format: Literal["gemm"] = "gemm"
    checkpoint_format: Literal["gemm"] = "gemm"
    pack_dtype: Literal["int32"] = "int32"
    modules_to_not_convert: Names = ()

    @classmethod
    def read(cls, given: JsonObject) -> Self:
        aliases = {"w_bit": "bits", "q_group_size": "group_size"}
        return super().read({aliases.get(key, key): value for key, value in given.items()})

    def weight_format(self) -> WeightFormat:
        """Returns the format of the weights that these settings describe.

        AWQ's files have zero points even if every zero point is the middle of the range.
        """
        form = MatrixFormat(
            layout="awq",
            bits=self.bits,
            block=(1, inputs_of_group(self.group_size)),
            has_zeros=True,
        )
        return WeightFormat((form,), self.modules_to_not_convert)
