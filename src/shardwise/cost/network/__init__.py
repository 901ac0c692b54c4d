"""Communication model: seconds of messages and collectives."""
