"""Process groups, transports and collectives between ranks."""
