"""What reads or changes the requests and answers of one connection: addresses, policy, telemetry, logins, recorders."""
