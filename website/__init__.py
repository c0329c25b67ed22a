"""The documentation as a site: MkDocs' settings, its hooks, and pages made from code."""
