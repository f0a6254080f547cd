"""kproxy's own metrics, pushed to a collector of OpenTelemetry."""
