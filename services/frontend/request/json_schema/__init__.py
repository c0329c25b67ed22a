"""JSON schemas of clients, translated to schemas that the grammar engine can enforce.

    ClientSchema → translation → the enforced schema, and the keywords that are not enforced

The translation drops annotations, follows references within the schema, and drops each keyword that
the engine cannot enforce. A value that matches the enforced schema also satisfies every keyword of
the client's schema that was not dropped. The package compiles nothing.
"""
