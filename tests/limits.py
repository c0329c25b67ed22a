"""Timeouts of waits in tests."""

HANG_S = 120.0
"""Timeout, in seconds, of a wait that ends by itself whenever a test passes.

The timeout only ends a test that hangs. It is long enough for a slow machine that runs other work
beside the tests, and shorter than pytest's own timeout, which cannot say what was waited for.
"""
