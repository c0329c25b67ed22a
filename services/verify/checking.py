"""Checks several receipts at the same time with one system."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc
import grpc.aio

from services.common import rpc
from services.receipts.keys import PublicKeys
from services.verify.given import GivenReceipt, Prompts, Unreadable, signature_of
from services.verify.receipt_files import FoundReceipt
from services.verify.recomputation import Recomputation
from services.verify.verdict import Outcome, Verdict

N_AT_ONCE = 64
"""Number of answers that the system computes at the same time."""


class SystemFailed(Exception):
    """The system that is to compute answers does not respond. The message says why."""


async def check(
    address: str,
    receipts: Sequence[FoundReceipt],
    *,
    model: str = "",
    keys: PublicKeys | None = None,
    prompts: Prompts = (),
    n_at_once: int = N_AT_ONCE,
    on_checked: Callable[[], object] = lambda: None,
) -> list[Verdict]:
    """Checks receipts with the system whose gRPC API is at `address`, host:port. Returns a verdict
    for each receipt, in order. `model` is the name of the model if the system serves several.
    `keys` are the public keys by which signatures are checked; without them no signature is
    checked. `prompts` has the prompts of receipts that contain only a digest of their prompt.
    `on_checked` is called after each receipt.

    Raises:
        SystemFailed: the system does not respond, or makes no receipts.
    """
    places = asyncio.Semaphore(n_at_once)
    async with grpc.aio.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) as channel:
        try:
            system = await Recomputation.of(channel, model)

            async def checked(found: FoundReceipt) -> Verdict:
                async with places:
                    verdict = await _verdict(found, system, keys, prompts)
                on_checked()
                return verdict

            return await asyncio.gather(*map(checked, receipts))
        except grpc.aio.AioRpcError as error:
            raise SystemFailed(f"{address}: {error.details()}") from error


async def _verdict(
    found: FoundReceipt, system: Recomputation, keys: PublicKeys | None, prompts: Prompts
) -> Verdict:
    signature, why = signature_of(found, keys)
    try:
        verdict = await system.verdict(GivenReceipt.of(found, prompts))
    except Unreadable as error:
        verdict = Verdict(place=found.place, outcome=Outcome.UNCHECKED, why=str(error))
    reasons = "; ".join(filter(None, (why, verdict.why)))
    return replace(verdict, signature=signature, why=reasons)
