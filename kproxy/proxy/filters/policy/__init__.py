"""Who may do what: rules, what each request names, decisions, refusals, what lists show, the audit."""
