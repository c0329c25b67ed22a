"""The operations as slow and obvious code, which says what each of them computes."""
