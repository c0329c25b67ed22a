"""A discrete-event simulator of the pipeline: the scheduler that serves, in virtual time.

It takes the place of the engine master and drives the very `Scheduler`, pool, policies and K/V
manager of `services.scheduler.core`; only the time that an iteration takes comes from a model of
costs. Knows no transport, no tensors and no real clock.
"""
