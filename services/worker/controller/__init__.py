"""The controller of a stage: an asyncio process that owns the stage's gRPC service.

It forwards plans to its ranks and to the next stage, fans out what ranks report, and watches that
they live. It never imports torch, never decodes a plan and never waits for a computation.
"""
