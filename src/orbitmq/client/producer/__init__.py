"""Sends messages: one at a time, many at a time, in batches, in transactions, as requests."""
