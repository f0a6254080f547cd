"""TLS on both sides: certificates and their subjects, contexts, handshakes on threads, a TLS socket."""
