"""Grammars of outputs, as frontends check them and the ranks of the last stage follow them.

Apart from `services.common`, because the scheduler has no llguidance.
"""
