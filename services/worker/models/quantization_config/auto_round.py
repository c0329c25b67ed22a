"""The settings of AutoRound, which stores weights in the layout of GPTQ or of AWQ."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.worker.models.config import MAX_SIZE
from services.worker.models.quantization_config.gptq import AUTO_ROUND, LISTS, QUANTISING
from services.worker.models.quantization_config.settings import (
    Method,
    Names,
    Settings,
    inputs_of_group,
)
from services.worker.models.weight_format import (
    EVERY_MATRIX,
    Bits,
    Layout,
    MatrixFormat,
    WeightFormat,
)

_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Special characters of regular expressions. A key of `extra_config` that contains one of them is a
regular expression."""

_LAYOUTS: dict[str, tuple[Layout, int]] = {
    "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
}
"""For each packing format, its layout and the number that must be added to stored zero points."""

_Packing = Literal[
    "auto_round", "auto_round:auto_awq", "auto_round:auto_gptq", "auto_round:gptqmodel"
]


class _Own(Settings):
    """Settings that override the common ones, for one module or for the modules that one regular
    expression matches."""

    ignored = AUTO_ROUND

    bits: Literal[4, 8, 16, 32] | None = None
    group_size: int | None = Field(default=None, ge=-1, le=MAX_SIZE)
    sym: bool | None = None


class AutoRound(Method):
    """The settings of AutoRound."""

    # The files say which modules are quantised: `LISTS` name the blocks of these.
    ignored = QUANTISING | (AUTO_ROUND - {"data_type"}) | LISTS

    quant_method: Literal["auto-round", "intel/auto-round"]
    data_type: Literal["int"] = "int"
    bits: Literal[4, 8]
    group_size: int = Field(default=128, ge=-1, le=MAX_SIZE)
    sym: bool = True
    packing_format: _Packing = "auto_round:auto_gptq"
    extra_config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    modules_to_not_convert: Names = ()

    def weight_format(self) -> WeightFormat:
        own = {_target(name): _Own.read(said) for name, said in self.extra_config.items()}
        plain = {name for name, said in own.items() if (said.bits or self.bits) > 8}
        forms = [self._form(name, said) for name, said in own.items() if name not in plain]
        ignored = (*sorted(plain), *self.modules_to_not_convert)
        return WeightFormat((*forms, self._form(EVERY_MATRIX, _Own())), ignored)

    def _form(self, target: str, own: _Own) -> MatrixFormat:
        """Returns the format of the modules that `target` names. Settings in `own` override the
        common settings."""
        layout, zero_offset = _LAYOUTS[self.packing_format]
        bits: Bits = 8 if (own.bits or self.bits) == 8 else 4
        if layout == "awq" and bits != 4:
            raise ValueError(f"packing_format auto_round:auto_awq with {bits} bits")
        size = self.group_size if own.group_size is None else own.group_size
        is_symmetric = self.sym if own.sym is None else own.sym
        return MatrixFormat(
            layout=layout,
            bits=bits,
            block=(1, inputs_of_group(size)),
            has_zeros=layout == "awq" or not is_symmetric,  # as for GPTQ, the middle otherwise
            zero_offset=zero_offset,
            targets=(target,),
        )


def _target(name: str) -> str:
    """Converts a key of `extra_config` to a target of `WeightFormat`: the name of a module, or
    "re:" and a regular expression. The expression may match anywhere within a module's name."""
    return f"re:.*(?:{name})" if _SPECIAL & set(name) else name
