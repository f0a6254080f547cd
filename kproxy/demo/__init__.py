"""Kafka in miniature: three brokers in memory, clients that talk to them, and a view of kproxy between the two."""
