"""Admission of accepted clients: limits, PROXY header, TLS, login and its renewal."""
