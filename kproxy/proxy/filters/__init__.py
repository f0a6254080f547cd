"""Readers and editors of one connection's requests and answers: addresses, policy, telemetry, logins, recorders."""
