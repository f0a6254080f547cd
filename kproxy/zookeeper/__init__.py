"""ZooKeeper's protocol: its records as data, and its sessions without I/O. Refuses to know Kafka."""
