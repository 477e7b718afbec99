"""Print what a program sees that `python -m` runs."""

import atexit
import concurrent.futures
import inspect
import json
import multiprocessing
import pickle
import sys

from .part import ANSWER


class Point:
    """Pickled by reference to `__main__`."""


def add(number: int) -> int:
    return number + ANSWER


def main():
    main_module = sys.modules["__main__"]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        spawned = pool.submit(add, 1).result(100)
    return {
        "argv": sys.argv,
        "path": sys.path[0],
        "spec": [main_module.__spec__.name, main_module.__spec__.origin, main_module.__spec__.parent],
        "names": sorted(name for name in vars(main_module) if name.startswith("__")),
        "file": [__file__, __name__, __package__, str(__cached__)],
        "pickled": isinstance(pickle.loads(pickle.dumps(Point())), Point),
        "source": inspect.getsource(add),
        "annotations": repr(add.__annotations__),
        "spawned": spawned,
    }


if __name__ == "__main__":
    # `__main__` is there to the end.
    atexit.register(lambda: print(pickle.loads(pickle.dumps(Point())).__class__, sys.modules["__main__"].__name__))
    print(json.dumps(main(), indent=1))
    raise ValueError("its traceback is the same")
