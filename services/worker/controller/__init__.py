"""The controller of a stage: an asyncio process that owns the stage's gRPC service.

The controller forwards plans to its ranks and to the next stage, sends the reports of ranks to all
watchers, and watches the ranks' heartbeats. The controller never imports torch, never decodes a
plan and never waits for a computation.

    service, endpoints   the gRPC methods, and the ports
    controller           owns the objects of the modules below, and passes a rank's messages to them
    assignment, departure, epoch, plan_relay, report_feed, rank_watch, loading, profile_orders
    rank_process         a rank as a child process
"""
