"""Reads bodies in JSON as pydantic models: types of fields, unknown fields, fields that are known
and not served, and objects of several kinds in one field."""
