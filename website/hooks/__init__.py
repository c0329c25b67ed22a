"""Hooks of MkDocs, which adapt the pages of the repository to the site."""
