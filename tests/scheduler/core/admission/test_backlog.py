"""The waiting work, as other threads read it."""

import sys
import threading
from collections.abc import Iterator

import pytest

from services.scheduler.core.admission.backlog import Backlog
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.request import Request, RequestId


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Lets threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_a_thread_may_read_the_work_while_requests_come_and_go() -> None:
    backlog = Backlog(ExpectedOutput(), is_fair=True)
    failures: list[RuntimeError] = []

    def read() -> None:
        try:
            for _ in range(30_000):
                assert backlog.work.n_prompt_tokens >= 0
        except RuntimeError as error:
            failures.append(error)

    requests = [Request(RequestId(str(it)), [1], 4, priority=it) for it in range(20)]
    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        for request in requests:
            backlog.add(request)
        for request in requests:
            backlog.remove(request)
    reader.join()
    assert failures == []
