"""The sans-I/O core that the live path and the offline path share; time is an integer argument, in nanoseconds."""
