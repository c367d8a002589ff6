"""The JSON bodies of requests and answers, one declaration each, grouped by family."""
