"""Messages for people: frames decoded, values as JSON, secrets masked."""
