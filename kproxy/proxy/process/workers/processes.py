"""Makes `kproxy run` one process or several, in the order that forking needs.

The template is forked first, before any thread runs, even that of the log. Refuses to know what the processes do.
"""

from kproxy.proxy import log_lines
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.server import Server


def make_server(config: Config) -> Server:
    """Set up the log and return a server that has not started; for several processes, fork the template first."""
    if config.workers == 1:
        log_lines.begin(config.log_level, config.log_format)
        return Server(config)
    from kproxy.proxy.process.workers.parent import Parent
    from kproxy.proxy.process.workers.template import Template
    from kproxy.proxy.process.workers.worker_process import work

    template = Template(work, config.drain_timeout_s)
    log_lines.begin(config.log_level, config.log_format)
    return Server(config, team=Parent(config.workers, template))
