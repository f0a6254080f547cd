"""Packet records to segments of TCP: headers, tunnels, fragments, packets captured twice or cut, and clocks."""
