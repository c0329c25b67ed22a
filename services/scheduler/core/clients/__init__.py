"""Clients: the limits of API keys, and what each client has been served."""
