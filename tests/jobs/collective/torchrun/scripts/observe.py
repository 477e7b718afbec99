"""Write down what a worker sees: each function below is a small script's worth of observations."""

import torch  # first, so that `edl run` imports it ahead of time

import inspect
import json
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import site
import subprocess
import sys
import threading
import traceback
import uuid
import warnings
from pathlib import Path

import beside

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
os.environ["CHOSEN"] = "by the script"
import chosen

os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"  # early enough for the first optimizer's imports
OBSERVATIONS = []


def observation(function):
    OBSERVATIONS.append(function)
    return function


class Point:
    """Pickled by reference to `__main__`."""

    def __init__(self, x):
        self.x = x


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index**2, int(torch.utils.data.get_worker_info() is not None)])


@observation
def arguments():
    line = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    command = {"arguments": line[1:], "comm": Path("/proc/self/comm").read_text()}
    return {"argv": sys.argv, "orig": sys.orig_argv[1:], "executable": sys.executable, "command": command}


@observation
def environment():
    return dict(os.environ)


@observation
def search_path():
    own = {"beside": beside.__file__, "chosen": [chosen.__file__, chosen.VALUE], "user": site.ENABLE_USER_SITE}
    return {"path": sys.path, "cwd": os.getcwd(), **own}


@observation
def main_module():
    main = sys.modules["__main__"]
    names = {name: value for name, value in vars(main).items() if name.startswith("__")}
    return {
        "names": sorted(names),
        "values": {name: repr(names.get(name)) for name in ("__name__", "__file__", "__package__", "__cached__")},
        "doc": main.__doc__.splitlines()[0],
        "loader": [type(main.__loader__).__name__, getattr(main.__loader__, "name", "")],
        "spec": repr(main.__spec__),
        "builtins": type(vars(main)["__builtins__"]).__name__,
        "same": vars(main) is globals(),
        "pickled": [pickle.loads(pickle.dumps(Point(3))).x, b"__main__" in pickle.dumps(Point(3))],
    }


@observation
def source():
    function, file = inspect.getsource(environment), inspect.getsourcefile(environment)
    return {"function": function, "file": file, "main": inspect.getmodule(environment).__name__}


@observation
def stack():
    return [line.strip() for frame in traceback.format_stack() for line in frame.splitlines()]


@observation
def random_numbers():
    import numpy

    drawn = [random.random(), float(torch.rand(1)), float(numpy.random.rand()), torch.initial_seed(), uuid.uuid4().hex]
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    return {"own": drawn, "seeded": [random.random(), float(torch.rand(1)), float(numpy.random.rand())]}


@observation
def signals():
    handlers = {int(number): signal.getsignal(number) for number in sorted(signal.valid_signals())}
    status = Path("/proc/self/status").read_text().splitlines()
    masks = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    names = {number: getattr(handler, "__name__", repr(handler)) for number, handler in handlers.items()}
    return {"handlers": names, "masks": masks, "wakeup": signal.set_wakeup_fd(-1), "alarm": signal.getitimer(0)}


@observation
def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        values = [getattr(stream, value) for value in ("encoding", "errors", "line_buffering", "write_through", "mode")]
        kinds = [type(stream).__name__, type(stream.buffer).__name__, stream is getattr(sys, f"__{name}__")]
        flags = __import__("fcntl").fcntl(stream.fileno(), 3) & os.O_APPEND
        found[name] = [*values, *kinds, stream.isatty(), stream.fileno(), flags]
    return found


@observation
def interpreter():
    return {
        "flags": [str(sys.flags), sys._xoptions, sys.warnoptions, [str(each) for each in FILTERS]],
        "hooks": [hook.__name__ for hook in (sys.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook)],
        "importers": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "edl": [name for name in LOADED if name.split(".")[0] == "edl"],
    }


@observation
def loggers():
    root = logging.getLogger()
    named = sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "edl")
    handlers = [[type(one).__name__ for one in logger.handlers] for logger in (root, logging.getLogger("torch"))]
    return {"handlers": handlers, "level": root.level, "class": logging.getLoggerClass().__name__, "edl": named}


@observation
def threads():
    main = threading.main_thread()
    native = threading.get_native_id() == os.getpid() == main.native_id
    return [threading.current_thread() is main, main.name, native, threading.active_count()]


@observation
def process():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "umask": status["Umask"].strip(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "descriptors": sorted(DESCRIPTORS),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "terminal": subprocess.run(["sh", "-c", "exec 3<>/dev/tty"], capture_output=True).returncode,
    }


@observation
def children():
    code = "import os, sys; print(os.environ['RANK'], sys.flags.unbuffered, sys.path[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    kind = [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name]
    batches = [batch.tolist() for batch in torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2)]
    return {"out": done.stdout, "code": done.returncode, "shell": os.system("exit 3"), "kind": kind, "read": batches}


@observation
def torch_settings():
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    import torch._inductor.config as inductor

    threads = [torch.get_num_threads(), torch.get_num_interop_threads()]
    return [threads, str(torch.get_default_dtype()), torch.is_grad_enabled(), inductor.max_autotune]


@observation
def process_group():
    import torch.distributed as dist

    before = [dist.is_available(), dist.is_initialized(), dist.is_torchelastic_launched(), str(dist.get_debug_level())]
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    found = [dist.get_rank(), dist.get_world_size(), total.tolist(), dist.get_node_local_rank()]
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    dist.barrier()
    dist.destroy_process_group()
    return {"before": before, "found": found, "mesh": str(device_mesh), "after": dist.is_initialized()}


def observe(function):
    try:
        return function()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


if __name__ == "__main__":  # guarded: a spawned child imports this file
    DESCRIPTORS = os.listdir("/proc/self/fd")
    FILTERS, LOADED = list(warnings.filters), set(sys.modules)
    seen = {function.__name__: observe(function) for function in OBSERVATIONS}
    name = f"{os.environ.get('RANK', '0')}.json"
    Path(os.environ["SEEN"], name).write_text(json.dumps(seen, indent=1, default=repr))
