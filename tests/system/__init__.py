"""Whole process trees on real sockets: what a user starts, kills and talks to."""
