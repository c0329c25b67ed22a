"""Native kernels in a process that gets no memory: an error of Python's, whatever has begun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native.library import runnable

# The only function by which the library asks for memory of its own.
NO_MEMORY = "#include <stddef.h>\nvoid* aligned_alloc(size_t a, size_t n) { return 0; }\n"

PROGRAM = """
import numpy as np
import torch
from kernels import DeltaNetForm, StateSpans
from kernels.forms.routing import RoutingForm
from kernels.native.library import open_library, runnable
from kernels.native.linear import NativeInt8Weight, NativeWeight, has_int8
from kernels.native.operations import ops_of
from kernels.packing.linear import pack
from kernels.upload import Uploads
from services.common.sampling import SamplingParams
from services.worker.engine.trial_iteration import TrialIteration
from services.worker.models import random_stage
from services.worker.models.rotary_config import (RopeConfig)
from services.worker.models.families.llama import LlamaConfig

torch.set_num_threads(4)

def attempt(name, operation):
    try:
        operation()
    except MemoryError as error:
        assert "native kernels" in str(error)
        print(name)

cache = torch.zeros(16, 16, 2, 16)
for name in runnable():
    print("build")
    ops = ops_of(open_library(name))
    plan = ops.plan_attention(
        np.array([0, 0]), np.array([150, 1]), block_tables=np.zeros((2, 10), np.int64),
        key_caches=[cache], n_heads=4, uploads=Uploads(),
    )
    attempt("attention", lambda: ops.attention(torch.zeros(151, 4, 16), cache, cache, plan))
    router = RoutingForm(n_chosen=1, is_softmax=True, normalises=False, factor=1.0)
    attempt("choice", lambda: ops.route_in_groups(torch.zeros(4, 8), router))
    ones = torch.ones(8)
    form = DeltaNetForm(1, 1, 8, 8, torch.ones(2, 24), -ones[:1], ones[:1], ones, 1e-5)
    spans = StateSpans(*torch.tensor([[0], [4], [0], [0]]))
    inputs, states = torch.zeros(1, 1, 24), torch.zeros(1, 1, 8, 8)
    attempt("states", lambda: ops.delta_net(torch.zeros(4, 34), inputs, states, spans, form))
for dtype in (torch.float32, torch.bfloat16):
    weight = NativeWeight.of(torch.ones(256, 64, dtype=dtype))
    attempt("linear", lambda: weight(torch.ones(64, 64, dtype=dtype)))
if has_int8():
    weight = NativeInt8Weight.of(torch.ones(256, 64))
    attempt("linear", lambda: weight(torch.ones(64, 64)))
weight = pack(torch.ones(256, 64), "int4")
attempt("groups", lambda: weight(torch.ones(64, 64)))
config = LlamaConfig(
    vocab_size=64, hidden_size=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
    max_position_embeddings=64, intermediate_size=64, rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=1e4),
)
stage = random_stage(config, dtype=torch.float32, device=torch.device("cpu"))
attempt("layers", TrialIteration(stage, [8, 1], block_size=16).run)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not runnable(), reason="the native library is not built")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_memory_that_is_not_there_is_a_memory_error(tmp_path: Path) -> None:
    (tmp_path / "none.c").write_text(NO_MEMORY)
    library = tmp_path / "none.so"
    subprocess.check_call(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "none.c"])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.split()
    # The process has the builds that are installed, also where sanitised ones are tested.
    n_builds = said.count("build")
    assert n_builds >= 1
    assert said.count("attention") == n_builds
    assert said.count("choice") == n_builds
    assert said.count("states") == n_builds
    assert said.count("linear") >= 2
    assert said.count("groups") == 1
    assert said.count("layers") == 1
