"""What an operator sees and does while kproxy runs: the admin port, traces, the other side of `kproxy ctl`."""
