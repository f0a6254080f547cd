"""What traffic says of a cluster: groups, coordinators, assignments. Refuses to know where events come from."""
