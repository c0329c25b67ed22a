"""Tests of what is delivered: built from the commit, and installed where nothing else is."""
