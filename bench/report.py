"""The results of a run: a table for people, JSON for programs, and whether every limit was kept."""

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import Result, Run

VERSION_LIMIT_S = 0.3


def passed(run: Run) -> bool:
    return run.version_cpu_s < VERSION_LIMIT_S and all(result.passed for result in run.results)


def show(run: Run, console: Console) -> None:
    table = Table(
        title="CPU time of the proxy, least of the rounds; ratio to HAProxy in TCP mode (median of rounds' ratios)",
        title_justify="left",
    )
    for name in ("case", "version", "load"):
        table.add_column(name, no_wrap=True)
    for name in ("HAProxy", "kproxy", "nginx ratio", "kproxy ratio", "limit", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for result in run.results:
        table.add_row(
            result.case.title,
            f"v{result.version}",
            result.load,
            _cost(result, "haproxy"),
            _cost(result, "kproxy"),
            f"{result.ratio('nginx'):.2f}",
            f"[bold]{result.ratio('kproxy'):.2f}[/] ({result.median('kproxy'):.2f})",
            f"{result.case.limit:.2f}",
            _verdict(result.passed),
        )
    console.print(table)
    rss = ", ".join(f"{name} {count / 1e6:.0f} MB" for name, count in run.rss_bytes.items())
    console.print(f"Memory (RSS) at the end: {rss}")
    console.print(
        f"CPU time of kproxy --version: {run.version_cpu_s:.3f} s, limit {VERSION_LIMIT_S} s",
        _verdict(run.version_cpu_s < VERSION_LIMIT_S),
    )
    if not run.pinned:
        console.print("[yellow]One core only: the proxies shared it with the load, so ratios are rough.[/]")


def as_json(run: Run) -> dict[str, Any]:
    return {
        "cases": [
            {
                "case": result.case.name,
                "title": result.case.title,
                "api_key": result.case.api_key,
                "api_version": result.version,
                "load": result.load,
                "requests_per_round": result.requests,
                "bytes_per_round": result.round_bytes,
                "limit": result.case.limit,
                "passed": result.passed,
                "proxies": {
                    proxy: {
                        "ratio": result.ratio(proxy),
                        "median": result.median(proxy),
                        "ratios": result.ratios(proxy),
                        "us_per_request": result.us_per_request(proxy),
                        "s_per_gb": result.s_per_gb(proxy),
                        "cpu_s": times,
                    }
                    for proxy, times in result.cpu_s.items()
                },
            }
            for result in run.results
        ],
        "rss_bytes": run.rss_bytes,
        "version_cpu_s": run.version_cpu_s,
        "version_limit_s": VERSION_LIMIT_S,
        "pinned": run.pinned,
        "passed": passed(run),
    }


def _cost(result: Result, proxy: str) -> str:
    if result.case.is_bulk:
        return f"{result.s_per_gb(proxy):.2f} s/GB"
    return f"{result.us_per_request(proxy):.1f} us"


def _verdict(good: bool) -> str:
    return "[green]pass[/]" if good else "[red]FAIL[/]"
