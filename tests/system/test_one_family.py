"""Everything serves where there is no IPv4: the local system, and the processes of the manifests.

Each runs in a network namespace of its own, which needs no rights of the machine.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(HANG_S + 20)]


@pytest.mark.skipif(sys.platform != "linux", reason="there are no network namespaces")
@pytest.mark.parametrize("what", ["local", "manifests"])
def test_it_serves_where_there_is_only_ipv6(what: str, model: Path, tmp_path: Path) -> None:
    assert shutil.which("ip"), "ip is missing: apt-get install iproute2"
    program = [sys.executable, "-m", "tests.system.one_family", what, str(model), str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
