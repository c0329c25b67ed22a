"""Drafts of tokens, which one iteration verifies together."""
