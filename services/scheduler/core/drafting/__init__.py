"""Drafting: guesses of next tokens, several of which one iteration verifies together."""
