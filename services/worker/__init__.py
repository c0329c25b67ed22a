"""One pipeline stage: a controller that speaks gRPC, and ranks that compute.

The controller (`__main__`, `service`, `controller`, `rank_process`) is one asyncio process
without torch. It starts a rank for each device (`rank` and what it imports), a fresh interpreter
with torch and without gRPC, and talks to it over a socket pair (`channel`). So an event loop
never competes with kernel launches for the interpreter lock, and a plan reaches the next stage
however busy the ranks of this one are.
"""
