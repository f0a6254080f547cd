"""Two sockets and one Session: read, forward, back-pressure, drain. Refuses to know brokers and policy."""
