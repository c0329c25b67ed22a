"""The native library is refused if its structures, numbers or parameters are not Python's."""

import ctypes
import dataclasses
from typing import get_type_hints

import pytest

from kernels.native.call import declare
from kernels.native.layout import check_layout, layout_of
from kernels.native.library import open_library, runnable
from kernels.native.structs import SHARED, LayerKVStruct
from kernels.steps import STEPS, Add

pytestmark = pytest.mark.skipif(not runnable(), reason="the native library is not built")


@pytest.fixture(name="library")
def loaded() -> ctypes.CDLL:
    return open_library(runnable()[0])


def swapped(structure: type[ctypes.Structure], one: str, other: str) -> type[ctypes.Structure]:
    """A copy of `structure` with two of its fields in each other's place."""
    names = {one: other, other: one}
    fields = [(names.get(name, name), kind) for name, kind, *_ in structure._fields_]
    return type(structure.__name__, (ctypes.Structure,), {"_fields_": fields})


def with_fields(step: type, *names: str) -> type:
    """A copy of a step's class that has the fields `names`, in this order."""
    kinds = get_type_hints(step)
    return dataclasses.make_dataclass(step.__name__, [(name, kinds[name]) for name in names])


def test_two_swapped_fields_of_a_structure_are_refused(library: ctypes.CDLL) -> None:
    wrong = swapped(LayerKVStruct, "block_size", "group")
    others = [each for each in SHARED if each is not LayerKVStruct]
    with pytest.raises(TypeError, match=r"LayerKV\.group is int64 at 24 in the native library"):
        check_layout(library, layout_of([*others, wrong]))


def test_two_swapped_fields_of_a_step_are_refused(library: ctypes.CDLL) -> None:
    steps = [with_fields(Add, "y", "x", "factor") if step is Add else step for step in STEPS]
    with pytest.raises(TypeError, match=r"Add\.y is int64 at 8 in the native library"):
        check_layout(library, layout_of(steps=steps))


def test_a_field_that_one_side_lacks_is_refused(library: ctypes.CDLL) -> None:
    steps = [with_fields(Add, "x", "y") if step is Add else step for step in STEPS]
    with pytest.raises(TypeError, match="Add is 24 bytes in the native library and 16 bytes in"):
        check_layout(library, layout_of(steps=steps))


def test_a_structure_that_python_lacks_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(TypeError, match=r"Seconds.* and unknown in Python"):
        check_layout(library, layout_of(SHARED[:-1]))


def test_steps_with_other_numbers_are_refused(library: ctypes.CDLL) -> None:
    first, second, *others = STEPS
    with pytest.raises(TypeError, match=r"STEPS\.EmbedPacked is 1 in the native library and 0 in"):
        check_layout(library, layout_of(steps=[second, first, *others]))


def test_two_swapped_parameters_are_refused(library: ctypes.CDLL) -> None:
    declare(library, "greedy", "element logits stride n_rows size tokens")
    with pytest.raises(TypeError, match="parameter 3 of orcinus_greedy is n_rows in the library"):
        declare(library, "greedy", "element logits stride size n_rows tokens")


def test_a_parameter_that_one_side_lacks_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(TypeError, match="parameter 5 of orcinus_greedy is tokens in the library"):
        declare(library, "greedy", "element logits stride n_rows size")
