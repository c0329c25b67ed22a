"""The implementation that all protocols share: it checks a request, submits its answers to the
scheduler, and turns the tokens that come back into text."""
