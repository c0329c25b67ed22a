"""How the operations of an implementation are found."""

from dataclasses import fields
from types import ModuleType

import pytest
from torch import Tensor

from kernels import TORCH, Ops


def module(name: str, **functions: object) -> ModuleType:
    """A module that defines these functions."""
    made = ModuleType(name)
    for function in functions.values():
        function.__module__ = name
    made.__dict__.update(functions)
    return made


class Norms:
    """An object that has one operation, and a method that is none."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    def other(self) -> None:
        """Is no operation."""


def test_a_source_gives_the_operations_of_its_names_and_others_are_kept() -> None:
    def gelu(x: Tensor) -> Tensor:
        return x

    norms = Norms()
    ops = Ops.of(module("ours", gelu=gelu), norms, has_fixed_shapes=True, otherwise=TORCH)
    assert ops.gelu is gelu
    assert ops.rms_norm == norms.rms_norm
    assert ops.has_fixed_shapes
    own = {"gelu", "rms_norm", "has_fixed_shapes"}
    names = {field.name for field in fields(Ops)} - own
    assert all(getattr(ops, name) is getattr(TORCH, name) for name in names)


def test_what_a_module_imports_is_not_its_own() -> None:
    def soft_cap(x: Tensor, cap: float) -> Tensor:
        return x

    elsewhere, importing = module("elsewhere", soft_cap=soft_cap), module("importing")
    importing.__dict__["soft_cap"] = soft_cap
    assert Ops.of(importing, otherwise=TORCH).soft_cap is TORCH.soft_cap
    assert Ops.of(importing, elsewhere, otherwise=TORCH).soft_cap is soft_cap


def test_what_is_given_comes_before_all_sources() -> None:
    def soft_cap(x: Tensor, cap: float) -> Tensor:
        return x

    assert Ops.of(soft_cap=soft_cap, otherwise=TORCH).soft_cap is soft_cap


def test_an_operation_that_is_nowhere_is_named() -> None:
    with pytest.raises(TypeError, match="rms_norm"):
        Ops.of(module("empty"))
