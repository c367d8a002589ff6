"""The fields of every request and answer, one declaration each, grouped by family."""
