"""Which brokers a cluster has, which port stands for which, and what kproxy asks them at an interval."""
