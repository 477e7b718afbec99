"""Write down what a worker sees: each function below is a small script's worth of observations."""

import torch  # first, so that `edl run` imports it ahead of time

import asyncio
import concurrent.futures
import contextvars
import faulthandler
import gc
import inspect
import json
import locale
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
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from pathlib import Path

import beside

OBSERVATIONS = {}


def observation(function):
    OBSERVATIONS[function.__name__] = function
    return function


class Point:
    """Pickled by reference to `__main__`."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is type(self) and other.x == self.x


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index**2, int(torch.utils.data.get_worker_info() is not None)])


def square(number):
    return {"square": number**2, "name": __name__, "beside": beside.NAME, "point": Point(number).x}


@observation
def arguments():
    return {"argv": sys.argv, "orig": sys.orig_argv[1:], "executable": sys.executable}


@observation
def command_line():
    line = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    return {"arguments": line[1:], "comm": Path("/proc/self/comm").read_text()}


@observation
def environment():
    return dict(os.environ)


@observation
def native_environment():
    return {name: subprocess.check_output(["printenv", name], text=True) for name in ("RANK", "WORLD_SIZE", "PATH")}


@observation
def search_path():
    return {"path": sys.path, "cwd": os.getcwd(), "beside": beside.__file__, "user": site.ENABLE_USER_SITE}


@observation
def main_module():
    main = sys.modules["__main__"]
    spec = main.__spec__
    names = {name: value for name, value in vars(main).items() if name.startswith("__")}
    names.pop("__builtins__")
    return {
        "names": sorted(names),
        "values": {name: repr(names.get(name)) for name in ("__name__", "__file__", "__package__", "__cached__")},
        "doc": main.__doc__.splitlines()[0],
        "loader": type(main.__loader__).__name__,
        "loads": getattr(main.__loader__, "name", ""),
        "spec": spec and [spec.name, spec.origin, spec.parent, spec.has_location],
        "builtins": type(vars(main)["__builtins__"]).__name__,
        "same": vars(main) is globals(),
    }


@observation
def pickled_classes():
    dumped = pickle.dumps(Point(3))
    return {"module": Point.__module__, "equal": pickle.loads(dumped) == Point(3), "main": b"__main__" in dumped}


@observation
def source():
    try:
        raise ValueError("seen")
    except ValueError:
        trace = traceback.format_exc().splitlines()
    return {
        "function": inspect.getsource(square),
        "class": inspect.getsource(Point).splitlines()[0],
        "file": inspect.getsourcefile(square),
        "trace": trace,
        "main": inspect.getmodule(square).__name__,
        "code": square.__code__.co_filename,
    }


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
    found = {}
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        found[int(number)] = getattr(handler, "__name__", repr(handler))
    status = Path("/proc/self/status").read_text().splitlines()
    masks = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    return {"handlers": found, "masks": masks, "wakeup": signal.set_wakeup_fd(-1), "alarm": signal.getitimer(0)}


@observation
def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        found[name] = {
            "terminal": stream.isatty(),
            "encoding": stream.encoding,
            "errors": stream.errors,
            "lines": stream.line_buffering,
            "through": stream.write_through,
            "mode": stream.mode,
            "original": stream is getattr(sys, f"__{name}__"),
            "kind": [type(stream).__name__, type(stream.buffer).__name__],
            "number": stream.fileno(),
            "append": bool(__import__("fcntl").fcntl(stream.fileno(), 3) & os.O_APPEND),
        }
    return found


@observation
def flags():
    return {"flags": str(sys.flags), "x": sys._xoptions, "w": sys.warnoptions, "filters": [str(f) for f in FILTERS]}


@observation
def interpreter():
    return {
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "bytecode": [sys.dont_write_bytecode, sys.pycache_prefix],
        "hooks": [hook.__name__ for hook in (sys.excepthook, sys.displayhook, sys.breakpointhook)],
        "threads": threading.excepthook.__name__,
        "unraisable": sys.unraisablehook.__name__,
        "trace": [repr(sys.gettrace()), repr(sys.getprofile())],
        "importers": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "digits": sys.get_int_max_str_digits(),
        "prefix": [sys.prefix, sys.base_prefix],
        "async": str(sys.get_asyncgen_hooks()),
        "interactive": [hasattr(sys, "ps1"), hasattr(sys, "last_value"), sys.exc_info()[0] is None],
    }


@observation
def collector():
    return {"enabled": gc.isenabled(), "threshold": gc.get_threshold(), "debug": gc.get_debug(), "garbage": gc.garbage}


@observation
def loggers():
    root = logging.getLogger()
    named = sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "edl")
    return {
        "handlers": [type(handler).__name__ for handler in root.handlers],
        "level": root.level,
        "class": logging.getLoggerClass().__name__,
        "raises": logging.raiseExceptions,
        "disabled": root.manager.disable,
        "edl": named,
        "torch": [type(handler).__name__ for handler in logging.getLogger("torch").handlers],
    }


@observation
def threads():
    return {
        "main": threading.current_thread() is threading.main_thread(),
        "name": threading.main_thread().name,
        "native": threading.get_native_id() == os.getpid() == threading.main_thread().native_id,
        "identity": threading.main_thread().ident == threading.get_ident(),
        "count": threading.active_count(),
    }


@observation
def process():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "session": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(),
        "umask": status["Umask"].strip(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "policy": os.sched_getscheduler(0),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "dumpable": status["NoNewPrivs"].strip(),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "descriptors": sorted(os.path.basename(name) for name in DESCRIPTORS),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "times": [resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < 1000, time.process_time() < 100],
        "terminal": subprocess.run(["sh", "-c", "exec 3<>/dev/tty"], capture_output=True).returncode,
    }


@observation
def descriptor_targets():
    return {name: "socket" if target.startswith("socket") else target for name, target in DESCRIPTORS.items()}


@observation
def localization():
    return {
        "set": locale.setlocale(locale.LC_ALL),
        "encoding": [locale.getpreferredencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "default": sys.getdefaultencoding(),
        "utf8": sys.flags.utf8_mode,
        "time": time.tzname,
    }


@observation
def faults():
    return {"enabled": faulthandler.is_enabled(), "usr1": faulthandler.unregister(signal.SIGUSR1)}


@observation
def temporary_files():
    with tempfile.TemporaryDirectory() as folder:
        return {"set": TEMPORARY, "folder": tempfile.gettempdir(), "made": os.path.dirname(folder)}


@observation
def event_loop():
    async def add():
        await asyncio.sleep(0)
        reader = await asyncio.create_subprocess_exec("echo", "in a loop", stdout=subprocess.PIPE)
        out, _ = await reader.communicate()
        return [out.decode(), await asyncio.to_thread(square, 3)]

    return {"run": asyncio.run(add()), "policy": type(asyncio.get_event_loop_policy()).__name__}


@observation
def context_variables():
    variable = contextvars.ContextVar("variable", default=1)
    token = variable.set(2)
    variable.reset(token)
    return {"value": variable.get(), "known": CONTEXT}


@observation
def subprocesses():
    code = "import os, sys; print(os.environ['RANK'], sys.flags.unbuffered, sys.path[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return {"out": done.stdout, "code": done.returncode, "shell": os.system("exit 3")}


@observation
def processes():
    found = {}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found["fork"] = pool.submit(square, 4).result(100)
    found["method"] = multiprocessing.get_start_method(allow_none=True)
    found["name"] = multiprocessing.current_process().name
    found["parent"] = multiprocessing.parent_process() is None
    return found


@observation
def data_loader():
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2)
    return [batch.tolist() for batch in loader]


@observation
def torch_settings():
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "parallel": torch.__config__.parallel_info(),
        "dtype": str(torch.get_default_dtype()),
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": str(torch.get_default_device()),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "cuda": torch.cuda.is_available(),
        "flush": float(torch.tensor([1e-42]) * 1.0),
    }


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


@observation
def modules():
    return {"edl": [name for name in LOADED if name.split(".")[0] == "edl"], "zygote": "runpy" in LOADED}


def main():
    rank = os.environ.get("RANK", "0")
    found = {}
    for name, function in OBSERVATIONS.items():
        try:
            found[name] = function()
        except Exception as exc:
            found[name] = f"{type(exc).__name__}: {exc}"
    Path(os.environ["SEEN"], f"{rank}.json").write_text(json.dumps(found, indent=1, default=repr))


if __name__ == "__main__":  # guarded: a spawned child imports this file
    DESCRIPTORS = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            DESCRIPTORS[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            pass  # of the listing itself
    FILTERS = list(warnings.filters)
    TEMPORARY = tempfile.tempdir
    CONTEXT = len(contextvars.copy_context())
    LOADED = set(sys.modules)
    main()
