"""Common parts of boards: queries with the board's variables, panels, rows, the frame of a board.

Each panel has a description and a unit. `only` is the condition under which a panel has data; it ends the description,
and tests allow the panel's queries to be empty.

Time series with many names (topics, groups) show the largest of the whole time range (`largest`): a plain topk chooses
again at each point, so that lines flicker. Refuses to know the panels of a board.
"""

from collections.abc import Iterable, Sequence
from typing import Any

Panel = dict[str, Any]

RATE = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
SHOWN = 20  # series of a panel by name

# APIs that long-poll: for data, or for members of a group. Their duration does not depend on the broker's speed.
WAITING = "Fetch|ShareFetch|JoinGroup|SyncGroup|ConsumerGroupHeartbeat"

PROCESS = ("job", "instance")
CLUSTER = (*PROCESS, "cluster")

# Variables: label, the metric that has their values, and the variables that restrict them.
_VARIABLES = {
    "job": ("Job", "kproxy_build_info", ()),
    "instance": ("kproxy", "kproxy_build_info", ("job",)),
    "cluster": ("Cluster", "kproxy_open_connections", PROCESS),
    "broker": ("Broker", "kproxy_open_connections", CLUSTER),
    "api": ("API", "kproxy_requests_total", CLUSTER),
    "topic": ("Topic", "kproxy_topic_bytes_total", CLUSTER),
    "group": ("Group", "kproxy_group_members", CLUSTER),
    "client_id": ("Client", "kproxy_client_info", CLUSTER),
}


# --- queries ---------------------------------------------------------------------------------------------------------


def of(metric: str, *scope: str, where: str = "") -> str:
    """Return the series of a metric that the variables in `scope` select."""
    matchers = [f'{name}=~"${name}"' for name in scope] + ([where] if where else [])
    return f"{metric}{{{', '.join(matchers)}}}"


def rate(metric: str, *scope: str, by: str = "", where: str = "") -> str:
    """Return the sum of events per second."""
    total = f"rate({of(metric, *scope, where=where)}[{RATE}])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def grown(metric: str, *scope: str, by: str = "", where: str = "") -> str:
    """Return the sum of events since about the previous point: whole numbers, for heat maps and rare events."""
    total = f"increase({of(metric, *scope, where=where)}[{RATE}])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def quantile(q: float, metric: str, *scope: str, by: str = "", where: str = "") -> str:
    """Return the q-quantile of a histogram."""
    labels = ", ".join((*([by] if by else []), "le"))
    series = of(f"{metric}_bucket", *scope, where=where)
    return f"histogram_quantile({q}, sum by ({labels}) (rate({series}[{RATE}])))"


def within_range(metric: str, *scope: str, by: str = "", where: str = "") -> str:
    """Return the number of events in the time range of the board; 0 if there was none."""
    total = f"increase({of(metric, *scope, where=where)}[$__range])"
    return f"sum by ({by}) ({total})" if by else f"sum({total}) or vector(0)"


def alike(query: str, *by: str) -> str:
    """Return a value that several kproxies of one cluster report alike, once: the maximum."""
    return f"max by ({', '.join(('job', 'cluster', *by))}) ({query})"


def largest(query: str, by: str, ranking: str) -> str:
    """Return the series of a query that are largest over the whole time range by another query."""
    return f"{query} and on ({by}) topk({SHOWN}, {ranking})"


# --- panels ----------------------------------------------------------------------------------------------------------


def target(expression: str, legend: str = "", **more: Any) -> Panel:
    return {"datasource": SOURCE, "expr": expression, "legendFormat": legend, **more}


def _panel(kind: str, title: str, description: str, only: str, targets: Sequence[Panel], width: int) -> Panel:
    if only:
        description = f"{description} Empty unless {only}."
    lettered = [{"refId": chr(ord("A") + number), **each} for number, each in enumerate(targets)]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": 8},
        "targets": lettered,
        "only": only,
    }


def _steps(steps: Iterable[tuple[float | None, str]]) -> Panel:
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for value, color in steps]}


def stat(
    title: str,
    description: str,
    unit: str,
    expression: str,
    *,
    width: int = 4,
    thresholds: Sequence[tuple[float | None, str]] = ((None, "text"),),
    only: str = "",
    mappings: Sequence[Panel] = (),
    legend: str = "",
) -> Panel:
    """One number now, with its curve behind it; thresholds: from which value on which colour."""
    panel = _panel("stat", title, description, only, [target(expression, legend)], width)
    panel["gridPos"]["h"] = 4
    panel["fieldConfig"] = {
        "defaults": {"unit": unit, "thresholds": _steps(thresholds), "mappings": list(mappings)},
        "overrides": [],
    }
    panel["options"] = {
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return panel


def series(
    title: str,
    description: str,
    unit: str,
    *targets: tuple[str, str],
    width: int = 8,
    stacked: bool = False,
    log: bool = False,
    only: str = "",
    threshold: float | None = None,
    exemplars: bool = False,
    maximum: float | None = None,
) -> Panel:
    """Curves over time. threshold: a red line, from which on something is wrong."""
    made = [target(query, legend, **({"exemplar": True} if exemplars else {})) for query, legend in targets]
    panel = _panel("timeseries", title, description, only, made, width)
    custom: Panel = {
        "lineWidth": 1,
        "fillOpacity": 18 if stacked else 6,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none"},
    }
    defaults: Panel = {"unit": unit, "custom": custom}
    if log:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    else:
        defaults["min"] = 0
    if maximum is not None:
        defaults["max"] = maximum
    if threshold is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
        defaults["thresholds"] = _steps(((None, "green"), (threshold, "red")))
    panel["fieldConfig"] = {"defaults": defaults, "overrides": []}
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def heatmap(title: str, description: str, expression: str, *, unit: str = "s", width: int = 12) -> Panel:
    """Buckets of a histogram over time; the expression keeps the label le."""
    panel = _panel("heatmap", title, description, "", [target(expression, "{{le}}", format="heatmap")], width)
    panel["targets"][0]["exemplar"] = True
    panel["fieldConfig"] = {"defaults": {"unit": "short"}, "overrides": []}
    panel["options"] = {
        "calculate": False,
        "yAxis": {"unit": unit},
        "color": {"scheme": "Turbo", "mode": "scheme", "steps": 64},
        "cellGap": 1,
        "tooltip": {"mode": "single", "yHistogram": True},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }
    return panel


def timeline(title: str, description: str, *targets: tuple[str, str], width: int = 12, only: str = "") -> Panel:
    """A value of 1 or 0 over time: green while it is 1."""
    panel = _panel("state-timeline", title, description, only, [target(*each) for each in targets], width)
    mapped = {"0": {"text": "no", "color": "red"}, "1": {"text": "yes", "color": "green"}}
    panel["fieldConfig"] = {
        "defaults": {"unit": "none", "mappings": [{"type": "value", "options": mapped}]},
        "overrides": [],
    }
    panel["options"] = {"mergeValues": True, "showValue": "never", "legend": {"showLegend": False}}
    return panel


def table(
    title: str,
    description: str,
    unit: str,
    expression: str,
    columns: Sequence[str],
    *,
    width: int = 12,
    only: str = "",
    value: str = "Value",
) -> Panel:
    """A row for each series, with these labels as columns, the largest value first."""
    made = target(expression, "", instant=True, range=False, format="table")
    panel = _panel("table", title, description, only, [made], width)
    panel["fieldConfig"] = {"defaults": {"unit": unit}, "overrides": []}
    order = {name: index for index, name in enumerate((*columns, "Value"))}
    panel["transformations"] = [
        {
            "id": "organize",
            "options": {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": {"Value": value}},
        }
    ]
    panel["options"] = {"showHeader": True, "sortBy": [{"displayName": value, "desc": True}]}
    return panel


def row(title: str, *panels: Panel, collapsed: bool = False) -> Panel:
    """Panels under a heading; collapsed: their queries run only when a user opens it."""
    return {"type": "row", "title": title, "collapsed": collapsed, "panels": list(panels)}


# --- boards ----------------------------------------------------------------------------------------------------------


def board(
    uid: str, title: str, description: str, variables: Sequence[str], parts: Sequence[Panel], *, clusters: str = ""
) -> Panel:
    """A board: panels and rows from left to right, top to bottom.

    variables: beside those of the process. clusters: the metric that has those which can be chosen, if not all can.
    """
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["kafka", "kproxy"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(name, clusters) for name in (*CLUSTER, *variables))]},
        "annotations": {"list": _annotations()},
        "links": _links(),
        "panels": _placed(parts),
    }


def _datasource() -> Panel:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(name: str, clusters: str) -> Panel:
    label, metric, scope = _VARIABLES[name]
    if name == "cluster" and clusters:
        metric = clusters
    query = f"label_values({of(metric, *scope) if scope else metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _annotations() -> list[Panel]:
    """Annotations: events that explain a step in any curve."""
    restarts = f"{of('kproxy_start_time_seconds', *PROCESS)} * 1000"
    rebalances = f"sum by (cluster, group) (increase({of('kproxy_group_rebalances_total', *CLUSTER)}[2m])) > 0"
    changed = 'change=~"elected|offline|moved"'
    elections = (
        f"sum by (cluster, change) (increase({of('kproxy_leadership_changes_total', *CLUSTER, where=changed)}[2m])) > 0"
    )
    return [
        _annotation("Restarts of kproxy", "red", restarts, "kproxy {{instance}} started", useValueForTime=True),
        _annotation("Rebalances", "orange", rebalances, "{{cluster}}: group {{group}} rebalanced"),
        _annotation("Leadership", "purple", elections, "{{cluster}}: leaders {{change}}"),
    ]


def _annotation(name: str, color: str, expression: str, text: str, **more: Any) -> Panel:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expression,
        "step": "60s",
        "titleFormat": text,
        **more,
    }


def _links() -> list[Panel]:
    return [
        {
            "type": "dashboards",
            "title": "kproxy",
            "tags": ["kproxy"],
            "asDropdown": False,
            "includeVars": True,
            "keepTime": True,
            "targetBlank": False,
        }
    ]


def _placed(parts: Sequence[Panel]) -> list[Panel]:
    """The panels with their places and ids; those of a row that is open stand behind it, as Grafana has it."""
    placed: list[Panel] = []
    number = 0
    top = 0

    def place(panels: Sequence[Panel]) -> list[Panel]:
        nonlocal number, top
        left = height = 0
        done = []
        for panel in panels:
            number += 1
            size = panel["gridPos"]
            if left + size["w"] > WIDTH:
                left, top, height = 0, top + height, 0
            place_of = {"x": left, "y": top, "w": size["w"], "h": size["h"]}
            done.append({"id": number, **{k: v for k, v in panel.items() if k != "only"}, "gridPos": place_of})
            left += size["w"]
            height = max(height, size["h"])
        top += height
        return done

    loose: list[Panel] = []
    for part in parts:
        if part["type"] != "row":
            loose.append(part)
            continue
        placed += place(loose)
        loose = []
        number += 1
        head = {"id": number, **part, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}}
        top += 1
        if part["collapsed"]:
            start = top
            head["panels"] = place(part["panels"])
            top = start
            placed.append(head)
        else:
            head["panels"] = []
            placed += [head, *place(part["panels"])]
    return placed + place(loose)


def panels_of(parts: Sequence[Panel]) -> list[Panel]:
    """All panels of a board's parts or of its JSON, those of rows too."""
    found = []
    for part in parts:
        found += panels_of(part.get("panels", ())) if part["type"] == "row" else [part]
    return found
