"""kproxy's own requests to brokers."""
