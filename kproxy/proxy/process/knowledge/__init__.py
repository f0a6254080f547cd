"""Groups and leaders of live clusters, decoded from copies of traffic outside the relays."""
