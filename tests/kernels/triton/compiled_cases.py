"""The cases that `test_compiles` compiles, and for which GPU.

Compiling all cases for all GPUs takes ten minutes or more of processor time, and
`make test-triton-all` does it. Otherwise a sample stands for them: the first case of every file of
cases (`compile_<name>.py`) and, of a file whose kernels differ from the commit `CHANGED_SINCE`,
`N_CHANGED` cases that are spread over the file. The cases of a sample take turns among the GPUs.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("kernels/triton", "tests/kernels/triton")
N_CHANGED = 5
_IMPORT = re.compile(r"^from kernels\.triton\.(\w+) import", re.MULTILINE)


def case_files() -> Sequence[Path]:
    """Returns the files of cases."""
    found = sorted(Path(__file__).parent.glob("compile_*.py"))
    return [path for path in found if path.stem != "compile_only"]


def cases_by_capability(capabilities: Sequence[int]) -> Mapping[int, Sequence[str]]:
    """Returns the names of the cases to compile for each compute capability: all, if the variable
    TRITON_CASES is `all`, else a sample."""
    files = {
        path: list(import_module(f"tests.kernels.triton.{path.stem}").CASES)
        for path in case_files()
    }
    if os.environ.get("TRITON_CASES") == "all":
        return {one: [name for names in files.values() for name in names] for one in capabilities}
    changed = changed_since(os.environ.get("CHANGED_SINCE") or "HEAD^")
    chosen: Mapping[int, list[str]] = {one: [] for one in capabilities}
    turn = 0
    for path, names in files.items():
        n_wanted = N_CHANGED if changed & set(sources_of(path)) else 1
        for name in names[:: -(-len(names) // n_wanted)]:
            chosen[capabilities[turn % len(capabilities)]].append(name)
            turn += 1
    return chosen


def changed_since(commit: str) -> set[Path]:
    """Returns the files of kernels and cases that differ from `commit`: none, if git does not know
    that commit."""
    command = ["git", "diff", "--name-only", commit, "--", *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {ROOT / line for line in done.stdout.splitlines()} if done.returncode == 0 else set()


def sources_of(path: Path) -> Iterator[Path]:
    """Yields a file of cases, and the modules of kernels that it imports, directly or not."""
    found, waiting = set[Path](), [path]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            names = _IMPORT.findall(one.read_text())
            waiting += [ROOT / "kernels" / "triton" / f"{name}.py" for name in names]
    yield from found
