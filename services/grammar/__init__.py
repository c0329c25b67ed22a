"""Grammars of outputs: frontends check them, and workers of last stages apply them to outputs.

The package is not in `services.common`, since the scheduler runs without the library llguidance.
"""
