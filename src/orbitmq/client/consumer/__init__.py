"""The push consumer: rebalancing, pulling, calling handlers and committing offsets."""
