"""The scheduler: the request pool, K/V accounting, Algorithm 1, and the engine master that drives
the stages.

The core (`request`, `request_pool`, `batch`, `kv_manager`, `scheduler`, `policies`) is pure: it
knows no asyncio, no gRPC, no tensors, no text, and no clock. `serving_loop` drives it;
`engine_master` talks to the stages; `service` talks to the frontends.
"""
