"""Stores of rows: what they promise is in `store`, and `directory` keeps those on disk."""
