"""End in the way that the variable END names, and a number for it."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time


def leave_text():
    sys.exit("a text as exit code")


def leave_by_number():
    raise SystemExit(NUMBER)


def raise_in_frames():
    try:
        {}["missing"]
    except KeyError as exc:
        raise ValueError("chained\nin two lines") from exc


def raise_with_hook():
    sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_frame.f_code.co_name)
    raise ValueError("for the hook")


def interrupt_with_hook():
    sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__)
    atexit.register(print, "atexit after an interrupt")
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("finally")


def interrupt():
    atexit.register(print, "atexit after an interrupt")
    raise KeyboardInterrupt


def start_processes():
    import concurrent.futures
    import multiprocessing

    for method in ("fork", "spawn", "forkserver"):
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            print(method, pool.submit(name_of, 1).result(100))


def name_of(number):
    return [number, __name__, sys.modules["__main__"].__file__, sys.argv]


def die():
    print("before")
    os.kill(os.getpid(), NUMBER)
    time.sleep(60)


def handle():
    number = NUMBER
    signal.signal(number, lambda *_: sys.exit(5))
    os.kill(os.getpid(), number)
    time.sleep(60)


def wait_for_threads():
    def work():
        threading.main_thread().join()
        print("thread after main")

    threading.Thread(target=work).start()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    atexit.register(print, "first registered, called last")
    atexit.register(print, "second registered, called first")
    print("main ends")


def write_raw():
    print("unbuffered", end=" ")
    subprocess.run(["echo", "from a child"], check=True)
    print("diagnostics", file=sys.stderr)
    sys.stdout.buffer.write(b"bytes\n")


def change_folder():
    import inspect

    os.chdir("/")
    print(__file__, inspect.getsource(change_folder).splitlines()[0])
    print(" ".join(sys.orig_argv[1:]), "/", sys.path[0])


if __name__ == "__main__":
    END, _, NUMBER = os.environ["END"].partition(" ")
    NUMBER = int(NUMBER or 0)
    globals()[END]()
