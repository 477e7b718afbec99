"""A teacher server as a process: `runner.py MODEL SETTINGS`, the settings as JSON.

Prints `ready PORT METRICS_PORT` when students may come, and `leaving` when it leaves discovery; that takes until the
file `leave_file`, if one is named, is there.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from edl_serving import ServerSettings, TeacherServer, serve
from tests.fast.serving import models


def main() -> int:
    name, text = sys.argv[1:]
    options = json.loads(text)
    leave_s, leave_file = options.pop("leave_s", 0.0), options.pop("leave_file", "")
    join_fails, leave_fails = options.pop("join_fails", False), options.pop("leave_fails", False)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)

    def join(server: TeacherServer) -> None:
        if join_fails:
            raise OSError("discovery is down")
        print("ready", server.port, server.metrics_port, flush=True)

    def leave() -> None:
        print("leaving", flush=True)
        while leave_file and not Path(leave_file).exists():
            time.sleep(0.01)
        time.sleep(leave_s)
        if leave_fails:
            raise OSError("discovery is down")

    return serve(ServerSettings(**options), getattr(models, name)(), join=join, leave=leave)


if __name__ == "__main__":
    sys.exit(main())
