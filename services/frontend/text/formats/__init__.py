"""Formats in which families of models write messages, with one file for each format.

`tool_format` and `reasoning_format` define what a format is. `registry` lists all formats in the
order in which they are looked for in a checkpoint. The other files without a family's name are code
that formats share, such as `arriving_text`, `call_reader` and `grammar`.
"""
