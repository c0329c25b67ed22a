"""The grammars of outputs, as frontends check them and the workers of the last stage follow them.

This is no part of `services.common`, because the scheduler does not have llguidance.
"""
