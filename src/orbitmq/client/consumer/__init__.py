"""Consuming: which queues are mine, where they begin, what was fetched, and what became of it."""
