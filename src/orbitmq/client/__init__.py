"""Producers, consumers and administration: one engine on one event loop, with two thin faces."""
