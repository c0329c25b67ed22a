"""A frontend answers at all addresses that its host stands for, by each of its protocols."""

from pathlib import Path

import httpx
import pytest

from services.common import rpc
from services.common.address import Address, parse
from tests.frontend.conftest import InferenceClient, running, soon
from tests.limits import HANG_S


@pytest.mark.parametrize("address", ["[::]:0", "localhost:0"])
async def test_clients_of_both_families_are_answered_by_both_apis(
    tmp_path: Path, address: str
) -> None:
    async with running(tmp_path, page=True, http_address=address, grpc_address=address) as site:
        ports = [parse(it).port for it in (site.frontend.http_address, site.frontend.grpc_address)]
        for host in ("127.0.0.1", "::1"):
            http, grpc = (str(Address(host, port)) for port in ports)
            async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
                assert (await client.get(f"http://{http}/ready")).status_code == 200
                assert (await client.get(f"http://{http}/")).headers["content-type"] == PAGE
            async with rpc.connect(grpc) as channel:
                assert (await soon(InferenceClient(channel).describe_model())).max_model_len


PAGE = "text/html; charset=utf-8"
