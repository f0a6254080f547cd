"""Authorization: rules, names in requests, decisions, refusals, filtered lists, the audit."""
