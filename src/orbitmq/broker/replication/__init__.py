"""A master's log, and what else it knows, on other brokers too."""
