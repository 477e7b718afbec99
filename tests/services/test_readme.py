"""The block of README.md that registers a teacher in Consul, as a reader of it would run it."""

from __future__ import annotations

import shlex
import sys

from tests.jobs.test_readme import COMMANDS, CONSUL, Workshop, workshop
from tests.plugins_consul import ConsulAgent

__all__ = ["workshop"]


def test_commands_with_consul(workshop: Workshop, consul_agent: ConsulAgent) -> None:
    (block,) = (block for block in COMMANDS if CONSUL in block.text)
    environ: dict[str, str] = {}
    for line in block.text.replace(CONSUL, consul_agent.url).splitlines():
        program, *arguments = shlex.split(line)
        if program == "export":
            name, _, value = arguments[0].partition("=")
            environ[name] = value
        elif arguments[0] == "serve":
            workshop.serve(arguments, environ)
        else:
            assert "ready" in workshop.run(sys.executable, "-m", "edl", *arguments, environ=environ)
