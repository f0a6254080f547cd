"""Sockets: listen, read, write, one epoll for all of them. Refuses to know brokers and what Kafka's bytes mean."""
