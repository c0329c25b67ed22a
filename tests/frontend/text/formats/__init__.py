"""Formats of tool calls: their readers, their grammars, and their templates."""
