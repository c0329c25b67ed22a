"""The OpenAI HTTP API: bodies, answers, server-sent events and errors as its clients know them."""
