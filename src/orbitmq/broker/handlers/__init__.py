"""What a broker answers, one module for each family of requests."""
