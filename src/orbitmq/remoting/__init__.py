"""Commands on sockets: connections, servers and channels, for name servers, brokers and clients."""
