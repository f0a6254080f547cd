"""SASL in both roles, without sockets: kproxy's login at brokers, and the check of clients' logins.

Tokens go in and out as bytes; Kafka's frames around them come from the schema. Secrets are in `Secret`s, whose texts
hide them, and in no error text.
"""
