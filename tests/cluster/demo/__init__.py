"""Tests that share one deployment of the demo overlay."""
