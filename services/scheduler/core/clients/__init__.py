"""Clients: the limits of API keys, and the service that each client has received."""
