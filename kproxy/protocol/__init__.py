"""The Kafka protocol, pure: bytes and schema in, values out; no clock, socket, logger, Arrow or Prometheus."""
