"""Algorithm 1 of the Orca paper, written line by line. It is slow and obvious, and serves as the
oracle of the real scheduler.

The pool is a list that each selection filters and sorts again. Where the paper leaves something
open, this code does the same as `services/scheduler/core/scheduler.py`: an empty batch is not sent
and not counted.
"""

from dataclasses import dataclass, field

INITIATION, RUNNING, INCREMENT = "initiation", "running", "increment"


@dataclass(eq=False)
class PaperRequest:
    """A request as in the pseudocode. It is finished after `n_iterations` iterations."""

    name: int
    arrival: int
    max_tokens: int
    n_iterations: int
    state: str = INITIATION
    n_run: int = 0


@dataclass
class PaperScheduler:
    """Lines 1 to 28 of the algorithm. A test calls `step` for each turn of its loop."""

    n_workers: int
    max_bs: int
    n_slots: int
    request_pool: list[PaperRequest] = field(default_factory=list)
    n_scheduled: int = 0  # line 1
    n_rsrv: int = 0  # line 2
    in_flight: list[list[PaperRequest]] = field(default_factory=list)

    def step(self) -> list[int]:
        """Runs one turn of the loop in line 3, and returns the names of the requests of the batch
        that was sent."""
        batch, self.n_rsrv = self.select(self.request_pool, self.n_rsrv)  # line 4
        if batch:
            self.in_flight.append(batch)  # line 5
            for req in batch:  # line 6
                req.state = RUNNING  # line 7
            self.n_scheduled += 1  # line 8
        if self.n_scheduled == self.n_workers or (not batch and self.n_scheduled):  # line 9
            self.wait_for_return()
        return [req.name for req in batch]

    def wait_for_return(self) -> None:
        """Runs lines 10 to 15, and removes finished requests from the pool, which the paper's pool
        does by itself."""
        for req in self.in_flight.pop(0):  # lines 10 and 11
            req.n_run += 1
            req.state = INCREMENT  # line 12
            if req.n_run == req.n_iterations:  # line 13
                self.n_rsrv -= req.max_tokens  # line 14
                self.request_pool.remove(req)
        self.n_scheduled -= 1  # line 15

    def select(
        self, pool: list[PaperRequest], n_rsrv: int
    ) -> tuple[list[PaperRequest], int]:  # line 17
        batch: list[PaperRequest] = []  # line 18
        pool = [req for req in pool if req.state != RUNNING]  # line 19
        pool.sort(key=lambda req: req.arrival)  # line 20
        for req in pool:  # line 21
            if len(batch) == self.max_bs:  # line 22
                break
            if req.state == INITIATION:  # line 23
                new_n_rsrv = n_rsrv + req.max_tokens  # line 24
                if new_n_rsrv > self.n_slots:  # line 25
                    break
                n_rsrv = new_n_rsrv  # line 26
            batch.append(req)  # line 27
        return batch, n_rsrv  # line 28
