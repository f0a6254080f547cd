"""From a client's connect to its relay: limits, PROXY headers, TLS, logins, ages."""
