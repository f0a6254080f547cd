"""From an accepted client to one that may use a cluster: limits, PROXY header, TLS, login and its renewal."""
