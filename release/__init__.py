"""Builds what is delivered: the wheel (`backend`), and all files of a release (`release`)."""
