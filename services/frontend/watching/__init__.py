"""The events of the scheduler for viewers, which are clients that watch the pipeline at work. All
viewers share one subscription."""
