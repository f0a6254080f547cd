"""Operating a running kproxy: the admin port, traces, and the client of `kproxy ctl` and `kproxy top`."""
