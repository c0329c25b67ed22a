"""The processor time of a benchmark is given to those who spent it."""

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import cpu_use

BURNT_S = 0.5
BURN = f"""
import sys, time
sys.stdin.readline()
start = time.process_time()
while time.process_time() - start < {BURNT_S}: pass
print(flush=True)
sys.stdin.readline()
"""


def burn(*, is_engine: bool) -> tuple[float, float]:
    """Processor time, our own and that of others, while a child uses `BURNT_S` of it."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
        subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE) as bystander,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        start = time.perf_counter()
        with cpu_use.watch(child.pid if is_engine else bystander.pid) as use:
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
        elapsed_s = time.perf_counter() - start
        child.kill()
        bystander.kill()
    return use.own_cpus * elapsed_s, use.other_cpus * elapsed_s


def test_processor_time_of_the_engine_is_our_own() -> None:
    own_s, _ = burn(is_engine=True)
    assert own_s > 0.9 * BURNT_S


def test_processor_time_of_somebody_else_is_not() -> None:
    own_s, other_s = burn(is_engine=False)
    assert own_s < 0.9 * BURNT_S
    assert other_s > 0.5 * BURNT_S


@pytest.mark.parametrize(("other_cpus", "is_disturbed"), [(0.02, False), (0.3, True)])
def test_a_run_bears_only_so_much_of_others(other_cpus: float, is_disturbed: bool) -> None:
    use = cpu_use.CpuUse()
    use.other_cpus = other_cpus
    assert use.is_disturbed == is_disturbed


def test_an_engine_has_its_descendants() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        root = psutil.Process(parent.pid)
        while not (children := root.children()):
            assert parent.poll() is None
        assert cpu_use.family(root) == {root, *children}
        parent.communicate(b"\n")
    assert cpu_use.family(root) == set()
