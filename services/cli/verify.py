"""`orcinus verify`: checks receipts, and computes their answers again.

With `--model`, the answers are computed by a local system that this command starts for the model,
with the element type, the quantization and the longest sequence in the receipts. With `--grpc` they
are computed by a system that serves already.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from tqdm import tqdm

from services.cli.arguments import count
from services.cli.local_system import DoesNotServe, serving
from services.cli.model import KINDS, say
from services.cli.programs import options_for
from services.common import bounded_file
from services.common.ending import give_up
from services.common.http_api import ApiError, HttpApi
from services.local.settings import LocalSettings
from services.receipts.keys import PublicKeys, SigningKeys, new_key
from services.verify.checking import N_AT_ONCE, SystemFailed, check
from services.verify.receipt_files import FoundReceipt, NoReceipts, receipts_in
from services.verify.verdict import Outcome, Signature, Verdict

KEYS_PATH = "/.well-known/orcinus-keys.json"
UNCHECKED = 3
"""Exit status if no receipt is wrong, but some receipt cannot be checked."""
MAX_KEYS_BYTES = 2**20
"""Largest size of a file of public keys, in bytes."""
MAX_PROMPTS_BYTES = 2**30
"""Largest size of a file of prompts, in bytes."""

Layout = tuple[tuple[str, str], ...]
"""Options of `services.local`, as pairs of a name and a value, that make a system compute as a
receipt states."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="orcinus verify",
        description="Checks receipts of answers, and computes the answers again.",
        epilog="The status is 0 if all tokens come again, 1 if a receipt is wrong, and 3 if some "
        "cannot be checked. Further options are those of services.local.",
    )
    made.add_argument(
        "receipts",
        metavar="RECEIPT",
        nargs="+",
        type=Path,
        help="file with a receipt, JSON lines, or whole answers or streams that have receipts",
    )
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", metavar="MODEL", help=f"{KINDS}; it is served while this lasts")
    where.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help="gRPC API of a system that serves already, with receipts",
    )
    made.add_argument(
        "--name", default="", help="name of the model, if the system at --grpc serves several"
    )
    made.add_argument(
        "--keys", metavar="FILE|URL", help="public keys: a JSON file, keys in PEM, or a server"
    )
    made.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSON lines of prompts as lists of tokens, for receipts with a digest of the prompt",
    )
    made.add_argument("--at-once", type=count, default=N_AT_ONCE, help=f"answers ({N_AT_ONCE})")
    made.add_argument("--json", action="store_true", help="print a JSON object for each receipt")
    return made


def main(arguments: Sequence[str]) -> int:
    """Checks receipts and prints a line for each. Returns the exit status. It is 2 if the check
    could not be made."""
    made = parser()
    options, rest = made.parse_known_args(arguments)
    if rest and options.model is None:
        made.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        receipts = [found for path in options.receipts for found in receipts_in(path)]
        keys = None if options.keys is None else keys_at(options.keys)
        prompts = [] if options.prompts is None else prompts_in(options.prompts)
        verdicts = checked(receipts, options, rest, keys=keys, prompts=prompts)
    except (ApiError, DoesNotServe, NoReceipts, OSError, SystemFailed, ValueError) as error:
        give_up(error, ready_fd=None)
        return 2
    for verdict in verdicts:
        line = json.dumps(verdict.to_json()) if options.json else str(verdict)
        sys.stdout.write(f"{line}\n")
    n_same = sum(verdict.outcome is Outcome.SAME for verdict in verdicts)
    if not options.json:
        sys.stdout.write(f"{n_same} of {len(verdicts)} receipts: the same tokens\n")
    return status_of(verdicts)


def checked(
    receipts: Sequence[FoundReceipt],
    options: argparse.Namespace,
    rest: Sequence[str],
    *,
    keys: PublicKeys | None,
    prompts: Sequence[Sequence[int]],
) -> list[Verdict]:
    """Returns the verdict about each receipt, in order.

    Receipts that need different options of `services.local` (`layout_of`) are checked with
    different systems, which run one after the other. If no system starts with some options, the
    receipts that need them are unchecked. An entry of `receipts` that has no receipt is put into
    the group of the first receipt.

    Raises:
        DoesNotServe: no system starts with any of the options.
        SystemFailed: a system does not answer, or makes no receipts.
    """
    by_layout: dict[Layout, list[int]] = {}
    first = next(found for found in receipts if not found.complaint)
    for place, found in enumerate(receipts):
        content = first.content if found.complaint else found.content
        layout = () if options.model is None else layout_of(content)
        by_layout.setdefault(layout, []).append(place)
    verdicts: dict[int, Verdict] = {}
    failures: list[DoesNotServe] = []
    with tqdm(total=len(receipts), unit="receipt", disable=None) as bar:
        for layout, places in by_layout.items():
            try:
                with _system(options, rest, layout) as address:
                    group = check(
                        address,
                        [receipts[place] for place in places],
                        model=options.name,
                        keys=keys,
                        prompts=prompts,
                        n_at_once=options.at_once,
                        on_checked=lambda: bar.update(1),
                    )
                    verdicts.update(zip(places, asyncio.run(group), strict=True))
            except DoesNotServe as error:
                failures.append(error)
                why = f"no system starts with {_in_words(layout)}"
                verdicts.update(_unchecked(receipts, places, why))
    if len(failures) == len(by_layout):
        raise failures[0]
    return [verdicts[place] for place in range(len(receipts))]


def _unchecked(
    receipts: Sequence[FoundReceipt], places: Sequence[int], why: str
) -> Iterator[tuple[int, Verdict]]:
    for place in places:
        name = receipts[place].place
        yield place, Verdict(place=name, outcome=Outcome.UNCHECKED, why=why)


def layout_of(receipt: dict[str, Any]) -> Layout:
    """Returns the options of `services.local` with which a system computes as a receipt states.
    Fields of the receipt that are missing or have unknown values give no options."""
    made: dict[str, Any] = {}
    match receipt.get("arithmetic"):
        case [{} as first, *_]:
            made = first
    known = ((name, made.get(name)) for name in ("dtype", "quantization"))
    found = [
        (f"--{name}", str(value))
        for name, value in known
        if value in get_args(LocalSettings.model_fields[name].annotation)
    ]
    if made.get("activations") == "exact":
        found.append(("--worker", "activations=exact"))
    match receipt.get("model"):
        case {"max_model_len": int(length)} if length is not True and length > 0:
            found.append(("--max-model-len", str(length)))
    return tuple(found)


@contextmanager
def _system(options: argparse.Namespace, rest: Sequence[str], layout: Layout) -> Iterator[str]:
    """Yields the address, host:port, of the gRPC API of the system that computes answers. The
    system is started for the `with` block, unless the command line gives the address of one."""
    if options.model is None:
        yield options.grpc
        return
    say(f"starting {options.model} {_in_words(layout)}")
    with TemporaryDirectory() as scratch:
        key_file = Path(scratch, "key.pem")
        key_file.write_bytes(new_key())
        given = [
            options.model,
            "--receipts=on_request",
            f"--receipt-keys-file={key_file}",
            f"--max-batch-size={options.at_once}",
            *("=".join(pair) for pair in layout),
            *rest,
        ]
        with serving(options_for(given, is_named=True)) as addresses:
            yield addresses.grpc


def _in_words(layout: Layout) -> str:
    return " ".join("=".join(pair) for pair in layout)


def keys_at(place: str) -> PublicKeys:
    """Returns the public keys in a file, or the public keys that a server at a URL publishes.

    Raises:
        ApiError: the server does not answer, or makes no receipts.
        OSError: the file cannot be read.
        ValueError: the file or the answer has no keys.
    """
    if place.startswith(("http://", "https://")):
        return PublicKeys.from_jwks(HttpApi(place.removesuffix(KEYS_PATH)).get(KEYS_PATH))
    content = bounded_file.read_bytes(Path(place), max_bytes=MAX_KEYS_BYTES)
    try:
        if content.lstrip().startswith(b"{"):
            return PublicKeys.from_jwks(json.loads(content))
        return SigningKeys.parse(content).published
    except ValueError as error:
        raise ValueError(f"{place} {error}") from error


def prompts_in(file: Path) -> list[list[int]]:
    """Returns the prompts in a file of JSON lines, as lists of tokens. Raises ValueError if a line
    is not a list of tokens."""
    found = []
    lines = bounded_file.read_bytes(file, max_bytes=MAX_PROMPTS_BYTES).decode().splitlines()
    for number, line in enumerate(lines, start=1):
        match json.loads(line):
            case [*tokens] if all(type(it) is int and 0 <= it < 2**32 for it in tokens):
                found.append(tokens)
            case _:
                raise ValueError(f"{file}: line {number} is no list of tokens")
    return found


def status_of(verdicts: Sequence[Verdict]) -> int:
    """Returns the exit status for the verdicts of all receipts: 0 if all tokens were the same, 1 if
    a receipt is wrong, and `UNCHECKED` if no receipt is wrong but some receipt is unchecked."""
    is_wrong = (it.outcome is Outcome.DIFFERS or it.signature is Signature.WRONG for it in verdicts)
    if any(is_wrong):
        return 1
    return UNCHECKED if any(it.outcome is Outcome.UNCHECKED for it in verdicts) else 0
