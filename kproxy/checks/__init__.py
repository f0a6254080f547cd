"""What can be said before traffic comes: `kproxy check`, `doctor`, `compat`."""
