"""A cluster's brokers, the port of each broker, and kproxy's own requests to brokers."""
