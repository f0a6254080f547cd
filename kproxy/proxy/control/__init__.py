"""What composes the proxy and answers for it: clusters, the server, the admin API. Not on the hot path."""
