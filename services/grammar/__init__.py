"""Grammars of outputs. Frontends check grammars, and workers of the last stage apply them.

The package is not in `services.common`, because the scheduler runs without the library llguidance.
"""
