"""A body of JSON becomes a model: fields of wrong types, fields that are unknown, fields that are
known and not served, and objects of several kinds in one place."""
