"""How the cost of a message grows with connections, queues, backlog, consumers, size, processes."""
