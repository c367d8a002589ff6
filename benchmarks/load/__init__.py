"""Load from processes of its own, and the servers that bear it."""
