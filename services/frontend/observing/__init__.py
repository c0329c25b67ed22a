"""Metrics of calls and answers, and the span of each call."""
