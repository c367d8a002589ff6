"""The name server: which broker holds which topic."""
