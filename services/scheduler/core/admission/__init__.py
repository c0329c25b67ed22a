"""Admission: which requests may wait, for how long, and which begin with a batch."""
