"""Knowledge about a cluster from its traffic: groups, leaders, changes. Refuses to know where events come from."""
