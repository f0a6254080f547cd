"""kproxy itself: does it keep up, whom does it let in, and what did it drop?"""

from dashboards.boards.model import (
    CLUSTER,
    PROCESS,
    RATE,
    board,
    grown,
    heatmap,
    of,
    quantile,
    rate,
    row,
    series,
    stat,
    timeline,
    within_range,
)

RED_FROM_1 = ((None, "green"), (1, "red"))
ORANGE_FROM_1 = ((None, "green"), (1, "orange"))
WATCH = "kproxy watches an interface"
OURS = "and on (job, instance) kproxy_build_info"

PARTS = (
    stat(
        "Faults",
        "Bytes in the time range that violate the protocol, such as TLS on a plaintext port.",
        "none",
        within_range("kproxy_protocol_faults_total", *CLUSTER),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Unbound brokers",
        "Brokers in responses of the time range without an open port at kproxy: clients cannot reach them. The log "
        "names them, with the reason.",
        "none",
        within_range("kproxy_unbound_brokers_total", *CLUSTER),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Address leaks",
        "Responses in the time range with a broker's own address: clients that use it bypass kproxy.",
        "none",
        within_range("kproxy_address_leaks_total", *CLUSTER),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Not recorded",
        "Events that --record did not write: the recorder fell behind, or the disk failed.",
        "none",
        within_range("kproxy_recorder_dropped_total", *PROCESS),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Log lines dropped",
        "Log lines that kproxy dropped in the time range because its output was not read.",
        "none",
        within_range("kproxy_log_lines_dropped_total", *PROCESS),
        thresholds=ORANGE_FROM_1,
    ),
    stat(
        "Workers restarted",
        "Workers that crashed in the time range; their clients had to reconnect.",
        "none",
        within_range("kproxy_worker_restarts_total", *PROCESS),
        thresholds=RED_FROM_1,
    ),
    row(
        "Does it keep up?",
        series(
            "Loop lag, p99",
            "Time that bytes waited before kproxy read them. It grows when kproxy's CPU core is saturated.",
            "s",
            (quantile(0.99, "kproxy_loop_lag_seconds", *PROCESS, by="instance"), "{{instance}}"),
            log=True,
            threshold=0.025,
        ),
        series(
            "Time inside kproxy",
            "From a frame's last byte to its send. If it is high while loop lag is low, peers read slowly.",
            "s",
            (quantile(0.5, "kproxy_proxy_duration_seconds", *PROCESS, by="direction"), "{{direction}} p50"),
            (quantile(0.99, "kproxy_proxy_duration_seconds", *PROCESS, by="direction"), "{{direction}} p99"),
            log=True,
        ),
        heatmap(
            "Loop lag",
            "Number of reads by delay.",
            grown("kproxy_loop_lag_seconds_bucket", *PROCESS, by="le"),
            width=8,
        ),
        series(
            "CPU",
            "CPU cores used by the process and by each worker. A process uses one core: near 1 it is saturated.",
            "none",
            (f"rate({of('process_cpu_seconds_total', *PROCESS)}[{RATE}]) {OURS}", "{{instance}}"),
            (f"rate({of('kproxy_worker_cpu_seconds_total', *PROCESS)}[{RATE}])", "{{instance}} worker {{worker}}"),
            threshold=0.9,
        ),
        series(
            "Memory",
            "Resident memory of the process, and of each worker, shared pages included.",
            "bytes",
            (f"{of('process_resident_memory_bytes', *PROCESS)} {OURS}", "{{instance}}"),
            (of("kproxy_worker_resident_memory_bytes", *PROCESS), "{{instance}} worker {{worker}}"),
        ),
        series(
            "Back-pressure",
            "Pauses per second in reading one side because the other does not accept more bytes; failed attempts per "
            "second to watch a socket with epoll (raise fs.epoll.max_user_watches).",
            "cps",
            (rate("kproxy_paused_reads_total", *CLUSTER, by="instance, side"), "{{instance}} {{side}}"),
            (rate("kproxy_epoll_refusals_total", *PROCESS, by="instance"), "{{instance}} no room in epoll"),
        ),
    ),
    row(
        "Connections and ports",
        series(
            "Connections and their limit",
            "Open client connections and their limit, which all clusters of one kproxy share.",
            "none",
            (f"sum by (instance) ({of('kproxy_open_connections', *CLUSTER)})", "{{instance}} open"),
            (f"max by (instance) ({of('kproxy_connection_limit', *CLUSTER)})", "{{instance}} limit"),
        ),
        timeline(
            "Ready and accepting",
            "Whether kproxy serves clients of the cluster, and accepts new connections.",
            (of("kproxy_ready", *CLUSTER), "{{instance}} {{cluster}} ready"),
            (of("kproxy_accepting", *CLUSTER), "{{instance}} {{cluster}} accepting"),
            width=8,
        ),
        series(
            "Open files",
            "Share of the files that the process may open. A connection takes two.",
            "percentunit",
            (
                f"{of('process_open_fds', *PROCESS)} / {of('process_max_fds', *PROCESS)} {OURS}",
                "{{instance}}",
            ),
            threshold=0.8,
            maximum=1,
        ),
        series(
            "Open ports",
            "Ports for brokers and for bootstrap.",
            "none",
            (of("kproxy_listeners", *CLUSTER), "{{instance}} {{cluster}}"),
        ),
        series(
            "Limits reached",
            "Connections per second that a limit refused, closed or slowed down, by setting of [cluster.limits].",
            "cps",
            (rate("kproxy_limits_reached_total", *CLUSTER, by="cluster, limit"), "{{cluster}} {{limit}}"),
        ),
        series(
            "Processes that relay",
            "Fewer than --workers: one has crashed, and its replacement has not started yet.",
            "none",
            (of("kproxy_workers", *PROCESS), "{{instance}}"),
            (of("kproxy_predecessor_connections", *PROCESS), "{{instance}} connections of the process before"),
        ),
    ),
    row(
        "Addresses and answers of kproxy's own",
        series(
            "Addresses rewritten",
            "Broker addresses in responses that were replaced by kproxy's, and those blanked in large responses.",
            "cps",
            (rate("kproxy_rewritten_addresses_total", *CLUSTER, by="api"), "{{api}}"),
            (rate("kproxy_neutralised_addresses_total", *CLUSTER, by="api"), "{{api}} unreadable"),
        ),
        series(
            "Answered by kproxy",
            "Requests that kproxy answered itself: refused by the policy, or ApiVersions in a newer version than "
            "kproxy reads, which clients repeat in an older one.",
            "reqps",
            (rate("kproxy_own_answers_total", *CLUSTER, by="api"), "{{api}}"),
        ),
        series(
            "Faults by kind",
            "Protocol violations by side and kind; the log has a line for each.",
            "cps",
            (rate("kproxy_protocol_faults_total", *CLUSTER, by="side, kind"), "{{side}} {{kind}}"),
        ),
        collapsed=True,
    ),
    row(
        "Who may do what: logins, policy, audit",
        series(
            "Logins",
            "SASL logins by outcome: of clients, if kproxy checks them, and of kproxy at brokers.",
            "cps",
            (
                rate("kproxy_authentications_total", *CLUSTER, by="side, mechanism, outcome"),
                "{{side}} {{mechanism}} {{outcome}}",
            ),
            only="kproxy checks logins or logs in itself",
        ),
        series(
            "Refused by the policy",
            "Requests that the policy refused, by reason.",
            "reqps",
            (rate("kproxy_policy_refusals_total", *CLUSTER, by="api, reason"), "{{api}}: {{reason}}"),
            only="a cluster has a policy",
        ),
        series(
            "Audit",
            "Audit lines that were written, and that could not be written.",
            "cps",
            (rate("kproxy_audit_lines_total", *PROCESS, by="instance"), "{{instance}} written"),
            (rate("kproxy_audit_lines_dropped_total", *PROCESS, by="instance"), "{{instance}} lost"),
        ),
        collapsed=True,
    ),
    row(
        "TLS",
        series(
            "Handshakes",
            "TLS handshakes with clients and brokers by result; docs/metrics.md explains each.",
            "cps",
            (rate("kproxy_tls_handshakes_total", *CLUSTER, by="side, result"), "{{side}}: {{result}}"),
            only="kproxy speaks TLS",
        ),
        series(
            "Handshakes, p99",
            "Time of handshakes that succeeded, the peer's included.",
            "s",
            (quantile(0.99, "kproxy_tls_handshake_seconds", *CLUSTER, by="side"), "{{side}}"),
            only="kproxy speaks TLS",
        ),
        series(
            "Certificates",
            "Time until the first certificate of a file expires.",
            "s",
            (
                f"{of('kproxy_certificate_expiry_timestamp_seconds', *CLUSTER)} - time()",
                "{{cluster}} {{side}} {{file}}",
            ),
            only="kproxy speaks TLS",
        ),
        series(
            "Certificates read again",
            "Changed certificate files that were loaded (ok), or are invalid (failed): then the previous ones stay "
            "in use.",
            "none",
            (
                grown("kproxy_certificate_reloads_total", *CLUSTER, by="cluster, side, result"),
                "{{cluster}} {{side}} {{result}}",
            ),
            only="kproxy speaks TLS",
        ),
        collapsed=True,
    ),
    row(
        "What it knows, records and was told",
        series(
            "Left out of insight",
            "Events that the process for consumer groups did not receive or follow, by reason.",
            "cps",
            (rate("kproxy_insight_left_out_total", *CLUSTER, by="cluster, why"), "{{cluster}} {{why}}"),
            only='detail = "topics"',
        ),
        series(
            "Follower of groups started again",
            "The process for consumer groups crashed, or hung and was killed: its state is lost.",
            "none",
            (grown("kproxy_insight_restarts_total", *PROCESS, by="instance, why"), "{{instance}} {{why}}"),
            only='detail = "topics"',
        ),
        series(
            "Reloads",
            "Reloads of the configuration, by outcome.",
            "none",
            (
                grown("kproxy_config_reloads_total", *PROCESS, by="instance, outcome"),
                "{{instance}} {{outcome}}",
            ),
        ),
        timeline(
            "Settings are those of the file",
            "No: the last reload was refused; the log has the reason.",
            (of("kproxy_config_last_reload_successful", *PROCESS), "{{instance}}"),
            width=8,
        ),
        series(
            "Age of the settings",
            "Time since they were loaded or confirmed.",
            "s",
            (f"time() - {of('kproxy_config_last_reload_success_timestamp_seconds', *PROCESS)}", "{{instance}}"),
        ),
        series(
            "Pushes to OpenTelemetry",
            "Pushes of metrics to a collector by outcome; the log has the reasons of failures.",
            "none",
            (grown("kproxy_otlp_pushes_total", *PROCESS, by="instance, outcome"), "{{instance}} {{outcome}}"),
            only="kproxy pushes to a collector",
        ),
        series(
            "Age of the last push",
            "Time since a collector last accepted a push.",
            "s",
            (f"time() - {of('kproxy_otlp_last_success_timestamp_seconds', *PROCESS)}", "{{instance}}"),
            only="kproxy pushes to a collector",
        ),
        series(
            "Dumps of the flight recorder",
            "Dumps by outcome. failed: the log has the reason, and no file is left; skipped: another dump was just "
            "written.",
            "none",
            (grown("kproxy_flight_dumps_total", *PROCESS, by="instance, outcome"), "{{instance}} {{outcome}}"),
            only="--flight",
        ),
        series(
            "Memory of the flight recorder",
            "Memory of kept frames and rows; at the limit the oldest are dropped.",
            "bytes",
            (of("kproxy_flight_bytes", *PROCESS), "{{instance}} {{kind}}"),
            only="--flight",
        ),
        series(
            "Upgrades that failed",
            "Upgrades in place that left the former process serving.",
            "none",
            (grown("kproxy_failed_upgrades_total", *PROCESS, by="instance"), "{{instance}}"),
        ),
        collapsed=True,
    ),
)

PARTS += (
    row(
        "From packets: kproxy watch",
        series(
            "Packets",
            "Packets a second of the watched ports, by interface.",
            "pps",
            (rate("kproxy_watch_packets_total", *PROCESS, by="instance, interface"), "{{instance}} {{interface}}"),
            only=WATCH,
        ),
        series(
            "Packets dropped",
            "Packets that the kernel dropped because kproxy read too slowly; no other figure includes them. Use a "
            "larger --buffer-mib or fewer ports.",
            "pps",
            (
                rate("kproxy_watch_dropped_packets_total", *PROCESS, by="instance, interface"),
                "{{instance}} {{interface}}",
            ),
            only=WATCH,
        ),
        series(
            "Behind",
            "Waiting time of the latest packets. Near a second and growing, packets are about to be dropped.",
            "s",
            (of("kproxy_watch_delay_seconds", *PROCESS), "{{instance}}"),
            threshold=1,
            only=WATCH,
        ),
        timeline(
            "Interfaces",
            "Whether each interface is there and up.",
            (of("kproxy_watch_interface_up", *PROCESS), "{{instance}} {{interface}}"),
            width=8,
            only=WATCH,
        ),
        series(
            "What packets do not show",
            "Gaps, segments sent again, other protocols, by kind; docs/tables.md has a sentence for each.",
            "cps",
            (rate("kproxy_watch_findings_total", *PROCESS, by="kind"), "{{kind}}"),
            only=WATCH,
        ),
        series(
            "Seen twice",
            "Packets that another interface had already captured; connections that are the other side of a NAT.",
            "cps",
            (rate("kproxy_watch_duplicate_packets_total", *PROCESS, by="instance"), "{{instance}} packets"),
            (rate("kproxy_watch_copied_connections_total", *CLUSTER, by="cluster"), "{{cluster}} connections"),
            only=WATCH,
        ),
        collapsed=True,
    ),
)

BOARD = board(
    "kproxy-itself",
    "kproxy: itself",
    "Load of kproxy itself, admission of clients, and losses.",
    (),
    PARTS,
)
