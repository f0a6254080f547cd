"""Groups of all protocols: members, generations, assignments and their causes."""
