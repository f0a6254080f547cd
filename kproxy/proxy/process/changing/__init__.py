"""New settings and new versions while clients are connected: reload, upgrade in place, systemd."""
