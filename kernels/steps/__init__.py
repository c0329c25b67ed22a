"""The steps of a program (`kernels.program`): what each computes, with which buffers and tensors.

A step is a dataclass. The native library's structures are derived from their fields, in their order
(`kernels.native.structs`), and `STEPS` numbers them.
"""

from kernels.steps.buffer import Buffer
from kernels.steps.call import Call
from kernels.steps.experts import (
    GATES,
    ApplyGate,
    Expert,
    Gated,
    GateForm,
    Route,
    RunExperts,
)
from kernels.steps.look_ups import AddPositions, Embed, EmbedPacked, LookUpAngles, Select
from kernels.steps.mixing import Attend, Heads, RotaryWriteKV, WriteKV
from kernels.steps.rows import (
    ACTIVATIONS,
    Activate,
    Add,
    Greedy,
    LayerNorm,
    Matrix,
    Multiply,
    RMSNorm,
    RMSNormPart,
    Scale,
    SigmoidAndMul,
    SoftCap,
)

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "STEPS",
    "Activate",
    "Add",
    "AddPositions",
    "ApplyGate",
    "Attend",
    "Buffer",
    "Call",
    "Embed",
    "EmbedPacked",
    "Expert",
    "GateForm",
    "Gated",
    "Greedy",
    "Heads",
    "LayerNorm",
    "LookUpAngles",
    "Matrix",
    "Multiply",
    "RMSNorm",
    "RMSNormPart",
    "RotaryWriteKV",
    "Route",
    "RunExperts",
    "Scale",
    "Select",
    "SigmoidAndMul",
    "SoftCap",
    "WriteKV",
]

# In the order of their numbers.
STEPS: tuple[type, ...] = (
    Embed,
    EmbedPacked,
    AddPositions,
    LookUpAngles,
    Select,
    RMSNorm,
    RMSNormPart,
    LayerNorm,
    Multiply,
    Activate,
    ApplyGate,
    RotaryWriteKV,
    WriteKV,
    Attend,
    Add,
    Scale,
    SoftCap,
    Route,
    RunExperts,
    SigmoidAndMul,
    Greedy,
)
