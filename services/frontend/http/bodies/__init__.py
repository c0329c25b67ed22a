"""Reads bodies in JSON as pydantic models: types of fields, unknown fields, fields that are known
but not supported, and objects of several kinds in one field."""
