"""`python -m services.common.show_metrics HOST:PORT NAME…`: prints samples of a process's metrics.

Each NAME is the beginning of a sample's line, so it may include labels. Samples that are 0 are left
out. So if a gauge has a sample for each possible state, only the sample of the present state is
printed.
"""

import argparse
import http.client
import sys
import urllib.error
import urllib.request

LIMIT_S = 3.0
"""Timeout in seconds for each wait for the process: to connect, and for the next bytes."""


def samples(address: str, names: tuple[str, ...]) -> list[str]:
    """Returns the lines of the samples whose text begins with one of `names`.

    Raises:
        OSError: the process does not answer, or not completely. Timeouts are such errors.
        HTTPException: the answer is not HTTP, or ends too early.
    """
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with directly.open(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(names) and float(line.rpartition(" ")[2])]


def reason_of(error: Exception) -> str:
    """Returns a text that says why `samples` raised the error."""
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def main() -> int:
    """Prints the samples and returns the exit status of the program."""
    parser = argparse.ArgumentParser(prog="show_metrics", description="Prints samples of metrics.")
    parser.add_argument("address", metavar="HOST:PORT", help="where metrics are told")
    parser.add_argument("names", metavar="NAME", nargs="+", help="how a sample begins")
    arguments = parser.parse_args()
    try:
        found = samples(arguments.address, tuple(arguments.names))
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{arguments.address} does not answer: {reason_of(error)}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
