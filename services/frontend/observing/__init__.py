"""What is told of calls: metrics, and the span of each call."""
