"""Admission: decides which requests may wait and for how long, and what must be ready before a
request begins."""
