"""A discrete-event simulator of the pipeline: runs the scheduler that serves, in virtual time.

The simulator takes the place of the engine master. It drives the same `Scheduler`, pool, policies
and K/V manager of `services.scheduler.core` that serve; only the durations of iterations come from
a model of costs. The simulator has no transport, no tensors and no real clock.
"""
