"""Tests with tracing backends of others, run as processes of their own."""
