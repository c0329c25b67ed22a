"""The one implementation behind both protocols: checks a request, submits its answers, and turns
the tokens that come back into text.
"""
