"""Admission: decides which requests may wait, how long, and which begin with a batch."""
