"""Sockets: listen, read, write, one epoll for all of them. Refuses to know brokers and the meaning of Kafka's bytes."""
