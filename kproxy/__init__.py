"""kproxy: a protocol-aware proxy for Apache Kafka and an analyser of its traffic."""

__version__ = "0.1.0"
