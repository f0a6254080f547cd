"""The logs of the coordinators, as clients fetch them."""
