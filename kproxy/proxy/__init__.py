"""The live proxy: the only package that touches sockets and the event loop."""
