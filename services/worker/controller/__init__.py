"""The controller of a stage: an asyncio process that owns the stage's gRPC service.

It forwards plans to its ranks and to the next stage, fans out what ranks report, and watches that
they live. It never imports torch, never decodes a plan and never waits for a computation.

    service, endpoints   its gRPC methods, and its ports
    controller           its parts, and which of them a rank's message is for
    assignment, epoch, plan_relay, report_feed, rank_watch, loading, profile_orders   the parts
    rank_process         a rank as a child process
"""
