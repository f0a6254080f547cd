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
        "Bytes that are not what the protocol says, within the time range: TLS on a plaintext port, damage.",
        "none",
        within_range("kproxy_protocol_faults_total", *CLUSTER),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Unbound brokers",
        "Brokers that answers named and for which kproxy has no open port, within the time range: clients cannot reach "
        "them. Its log says which and why.",
        "none",
        within_range("kproxy_unbound_brokers_total", *CLUSTER),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Address leaks",
        "Answers with a broker's own address in them, within the time range: clients that follow it go around kproxy.",
        "none",
        within_range("kproxy_address_leaks_total", *CLUSTER),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Not recorded",
        "Events that are in no table of --record: the recorder fell behind, or the disk failed.",
        "none",
        within_range("kproxy_recorder_dropped_total", *PROCESS),
        thresholds=RED_FROM_1,
    ),
    stat(
        "Log lines dropped",
        "Lines that kproxy left out within the time range since nobody read its log.",
        "none",
        within_range("kproxy_log_lines_dropped_total", *PROCESS),
        thresholds=ORANGE_FROM_1,
    ),
    stat(
        "Workers restarted",
        "Workers that died within the time range: their clients connected anew.",
        "none",
        within_range("kproxy_worker_restarts_total", *PROCESS),
        thresholds=RED_FROM_1,
    ),
    row(
        "Does it keep up?",
        series(
            "Loop lag, p99",
            "How long bytes waited at kproxy before it read them. It grows when kproxy's core is full.",
            "s",
            (quantile(0.99, "kproxy_loop_lag_seconds", *PROCESS, by="instance"), "{{instance}}"),
            log=True,
            threshold=0.025,
        ),
        series(
            "Time inside kproxy",
            "From a frame's last byte to the send that took it. High with a low loop lag: peers are slow to read.",
            "s",
            (quantile(0.5, "kproxy_proxy_duration_seconds", *PROCESS, by="direction"), "{{direction}} p50"),
            (quantile(0.99, "kproxy_proxy_duration_seconds", *PROCESS, by="direction"), "{{direction}} p99"),
            log=True,
        ),
        heatmap(
            "Loop lag",
            "How many reads came how late.",
            grown("kproxy_loop_lag_seconds_bucket", *PROCESS, by="le"),
            width=8,
        ),
        series(
            "CPU",
            "Cores of the process, and of each worker. One process has one core: near 1 it is full.",
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
            "Pauses a second in reading a side because the other took no more; attempts a second to watch a socket for "
            "which epoll had no room (raise fs.epoll.max_user_watches).",
            "cps",
            (rate("kproxy_paused_reads_total", *CLUSTER, by="instance, side"), "{{instance}} {{side}}"),
            (rate("kproxy_epoll_refusals_total", *PROCESS, by="instance"), "{{instance}} no room in epoll"),
        ),
    ),
    row(
        "Connections and ports",
        series(
            "Connections and their limit",
            "Client connections open now, and how many there can be; clusters of one kproxy share the limit.",
            "none",
            (f"sum by (instance) ({of('kproxy_open_connections', *CLUSTER)})", "{{instance}} open"),
            (f"max by (instance) ({of('kproxy_connection_limit', *CLUSTER)})", "{{instance}} limit"),
        ),
        timeline(
            "Ready and accepting",
            "Whether clients of a cluster can be served, and whether new connections are accepted.",
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
            "Ports of brokers and to bootstrap.",
            "none",
            (of("kproxy_listeners", *CLUSTER), "{{instance}} {{cluster}}"),
        ),
        series(
            "Limits reached",
            "Connections a second that a limit kept out, ended or slowed down. Which limit is the setting of "
            "[cluster.limits].",
            "cps",
            (rate("kproxy_limits_reached_total", *CLUSTER, by="cluster, limit"), "{{cluster}} {{limit}}"),
        ),
        series(
            "Processes that relay",
            "Fewer than --workers: one has died, and its replacement is not there yet.",
            "none",
            (of("kproxy_workers", *PROCESS), "{{instance}}"),
            (of("kproxy_predecessor_connections", *PROCESS), "{{instance}} connections of the process before"),
        ),
    ),
    row(
        "Addresses and answers of kproxy's own",
        series(
            "Addresses rewritten",
            "Broker addresses in answers that became kproxy's, and those made unreadable behind large answers.",
            "cps",
            (rate("kproxy_rewritten_addresses_total", *CLUSTER, by="api"), "{{api}}"),
            (rate("kproxy_neutralised_addresses_total", *CLUSTER, by="api"), "{{api}} unreadable"),
        ),
        series(
            "Answered by kproxy",
            "Requests that no broker saw: refused by the policy, or ApiVersions newer than kproxy reads, which clients "
            "repeat in an older version.",
            "reqps",
            (rate("kproxy_own_answers_total", *CLUSTER, by="api"), "{{api}}"),
        ),
        series(
            "Faults by kind",
            "Which side sent what is no Kafka; the log has a line each.",
            "cps",
            (rate("kproxy_protocol_faults_total", *CLUSTER, by="side, kind"), "{{side}} {{kind}}"),
        ),
        collapsed=True,
    ),
    row(
        "Who may do what: logins, policy, audit",
        series(
            "Logins",
            "SASL logins by outcome: of clients, where kproxy checks them, and its own at brokers.",
            "cps",
            (
                rate("kproxy_authentications_total", *CLUSTER, by="side, mechanism, outcome"),
                "{{side}} {{mechanism}} {{outcome}}",
            ),
            only="kproxy checks logins or logs in itself",
        ),
        series(
            "Refused by the policy",
            "Requests that the policy refused, by why.",
            "reqps",
            (rate("kproxy_policy_refusals_total", *CLUSTER, by="api, reason"), "{{api}}: {{reason}}"),
            only="a cluster has a policy",
        ),
        series(
            "Audit",
            "Lines of the audit that were written, and that could not be.",
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
            "Handshakes with clients and with brokers, by result; docs/metrics.md says what each means.",
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
            "Changed files that are used now (ok), or that are not sound (failed): then those before stay in use.",
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
            "What the process that follows groups did not get or did not follow, by why.",
            "cps",
            (rate("kproxy_insight_left_out_total", *CLUSTER, by="cluster, why"), "{{cluster}} {{why}}"),
            only='detail = "topics"',
        ),
        series(
            "Follower of groups started again",
            "The process that follows groups ended, or hung and was killed: what it knew is gone.",
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
            "No: the last reload was refused, and the log says why.",
            (of("kproxy_config_last_reload_successful", *PROCESS), "{{instance}}"),
            width=8,
        ),
        series(
            "Age of the settings",
            "Since they were loaded or confirmed.",
            "s",
            (f"time() - {of('kproxy_config_last_reload_success_timestamp_seconds', *PROCESS)}", "{{instance}}"),
        ),
        series(
            "Pushes to OpenTelemetry",
            "Pushes of metrics to a collector, by outcome; the log says why they fail.",
            "none",
            (grown("kproxy_otlp_pushes_total", *PROCESS, by="instance, outcome"), "{{instance}} {{outcome}}"),
            only="kproxy pushes to a collector",
        ),
        series(
            "Age of the last push",
            "Since a collector last took one.",
            "s",
            (f"time() - {of('kproxy_otlp_last_success_timestamp_seconds', *PROCESS)}", "{{instance}}"),
            only="kproxy pushes to a collector",
        ),
        series(
            "Dumps of the flight recorder",
            "By outcome. failed: the log says why, and nothing of it stays; skipped: another one was just written.",
            "none",
            (grown("kproxy_flight_dumps_total", *PROCESS, by="instance, outcome"), "{{instance}} {{outcome}}"),
            only="--flight",
        ),
        series(
            "Memory of the flight recorder",
            "What it keeps of frames and of rows; at its bound the oldest goes.",
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
            "Packets that the kernel dropped since kproxy had not read those before them: they are in no other number. "
            "A larger --buffer-mib, fewer ports.",
            "pps",
            (
                rate("kproxy_watch_dropped_packets_total", *PROCESS, by="instance, interface"),
                "{{instance}} {{interface}}",
            ),
            only=WATCH,
        ),
        series(
            "Behind",
            "How long the packets read last had waited: near a second and growing, packets are about to be dropped.",
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
            "Packets that another interface had shown already; connections that are another one behind a NAT.",
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
    "Does kproxy keep up, whom does it let in, and what did it drop?",
    (),
    PARTS,
)
