"""The Ray cluster that a command or a run works on: one that runs already, or one started here for as long as needed.

with ray_cluster():
    ...                  RAY_ADDRESS=host:6379 or auto: that cluster, which goes on afterwards
                         local, or not set: one started here, which ends with the block
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from verl_ext.values import UsageError, first_line

ANSWERS_WITHIN = 10  # seconds
OBJECT_STORE = 128 << 20  # bytes of shared memory: rows of a few numbers are all that travels

_NEEDED = (
    "RAY_ADDRESS must be host:port of the head of a Ray cluster, or auto, on one of the cluster's machines (ray job"
    " submit starts a command there), or local"
)


@contextlib.contextmanager
def ray_cluster(num_cpus: int) -> Iterator[None]:
    """Be connected to the cluster at $RAY_ADDRESS, or to one of `num_cpus` CPUs that is started for the block; where
    this process is connected already, that connection is used and kept.

    Raises `UsageError` where there is no cluster at $RAY_ADDRESS, or none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: nothing is sent to its makers
    import ray  # heavy

    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    _check(address)
    # What workers print stays in Ray's own log files: an error that matters is returned by the work itself.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    started: dict[str, Any] = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    on_signal = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, **quiet, **(started if address == "local" else {}))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_signal)  # Ray's handler would abort the process
    except Exception as error:  # of many kinds
        raise UsageError(f"{_NEEDED}; got {address}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Raises `UsageError` for an address where nothing answers, for which Ray waits for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        raise UsageError(f"{_NEEDED}; got {address}")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"{_NEEDED}; got {address}: {first_line(error)}") from error
