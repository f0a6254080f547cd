"""The way to a broker: names to addresses, dial, PROXY header, TLS, login, and kproxy's own requests there."""
