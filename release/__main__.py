"""Makes a release of the commit that is checked out, and publishes nothing.

    python -m release [--tools BIN] [DIRECTORY]

DIRECTORY, by default `dist`, gets the wheels for x86-64 and Arm, the Helm chart, the list of
packages that the wheels were tested with (CycloneDX), the statement of where all these come from
(in-toto, SLSA), and the SHA-256 digests of all of them. BIN has the programs of
release/requirements.txt. All of it follows from the commit, the compilers and the programs: a
second call makes the same bytes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from release.release import Unreleasable, make


def main() -> None:
    """Makes the release that the command line describes. If that fails, the process ends with a
    message."""
    parser = argparse.ArgumentParser(
        prog="python -m release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tools", type=Path, default=Path(sys.executable).parent, metavar="BIN")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("dist"))
    arguments = parser.parse_args()
    try:
        made = make(arguments.directory, arguments.tools)
    except Unreleasable as error:
        sys.exit(f"no release was made: {error}")
    except FileNotFoundError as error:
        sys.exit(f"no release was made: {error.filename} is missing")
    except subprocess.CalledProcessError as error:
        sys.exit(f"no release was made: {error.cmd[0]} ended with status {error.returncode}")
    sys.stdout.write("".join(f"{path}\n" for path in made))
    sys.stdout.write(
        "Nothing was published. docs/operations/versions.md says what is left to do.\n"
    )


if __name__ == "__main__":
    main()
