"""What composes the proxy and answers for it: clusters, the server, the process. Not on the hot path.

Its rooms: `clients` (from connect to relay), `workers` (several processes), `operators` (the admin port), `changing`
(reload, upgrade, drain), `checks` (check, doctor, compat), `knowledge` (groups and leaders of live traffic).
"""
