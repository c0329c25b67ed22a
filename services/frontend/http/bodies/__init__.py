"""Reads bodies in JSON as pydantic models. Handles wrong types, unknown fields, fields that are
known but not supported, and objects of several kinds in one field."""
