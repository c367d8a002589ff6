"""A consumer that the application asks for messages, instead of being called with them."""
