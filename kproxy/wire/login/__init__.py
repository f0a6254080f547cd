"""SASL tokens on a connection, with and without Kafka headers."""
