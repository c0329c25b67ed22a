"""The one implementation behind both protocols: it checks a request, submits its answers to the
scheduler, and turns the tokens that come back into text."""
