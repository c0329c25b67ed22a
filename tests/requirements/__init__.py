"""Tests of the lock files in `requirements`."""
