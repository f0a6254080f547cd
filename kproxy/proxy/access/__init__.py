"""Who a client is, and what it may do: identities, SASL both ways, policy, limits, audit. Refuses to know sockets."""
