"""Receipts: signed records that say how an answer was made.

A receipt names the weights, the tokenizer, the chat template and the arithmetic, and has the
prompt's tokens, the options, the seed and the tokens of one answer. Frontends make receipts, and
`orcinus verify` checks them. This package has the form of receipts, their canonical JSON and the
keys that sign them. It does not depend on servers or models.
"""
