"""The operations as slow and obvious code, which defines what each operation computes."""
