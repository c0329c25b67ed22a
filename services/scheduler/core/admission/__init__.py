"""Admission: who may wait, for how long, and who begins with which batch."""
