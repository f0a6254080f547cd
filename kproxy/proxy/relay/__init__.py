"""Sockets: accept, read, forward, back-pressure, drain. Refuses to know brokers, policy and what Kafka's bytes mean."""
