"""The Ray cluster of a command or run, found or started here.

with ray_cluster(num_cpus=8):
    ...                  RAY_ADDRESS=host:6379 or auto: that cluster, which keeps running afterwards
                         not set: the cluster on this machine, else one started here, which ends with the block
                         local: always one started here
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from verl_ext.options import UsageError, first_line, must

ANSWERS_WITHIN = 10  # seconds
OBJECT_STORE = 128 << 20  # bytes of shared memory; no large object passes through it

_NEEDED = (
    "be host:port of the head of a Ray cluster, or auto, on one of the cluster's machines (ray job submit starts a"
    " command there), or local"
)


@contextlib.contextmanager
def ray_cluster(num_cpus: int) -> Iterator[bool]:
    """Connect to a cluster; yield whether it was started here.

    num_cpus: the CPUs of a cluster that is started here, on this machine alone. A connection that this process has
    already is used and kept. Raises `UsageError` if there is no cluster at $RAY_ADDRESS, or none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import of Ray: no usage statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences Ray's announcement of a change
    import ray  # heavy

    # Keep an earlier connection, which belongs to this function's caller.
    if ray.is_initialized():
        yield False
        return
    address = _reachable(os.environ.get("RAY_ADDRESS", ""))
    on_signal = signal.getsignal(signal.SIGTERM)
    # The output of workers stays in Ray's log files; the work itself returns the errors that matter.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    is_own = address in ("", "local")
    options: dict[str, Any] = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE} if is_own else {}
    try:
        try:
            ray.init(address or None, **quiet, **options)
        except ValueError:
            if address:
                raise
            is_own = False
            ray.init(**quiet)  # a cluster runs on this machine, so its resources cannot be set
    except Exception as error:  # Ray raises many kinds
        got = f"{address or 'nothing'}: {first_line(error)}"
        raise UsageError(must("RAY_ADDRESS", _NEEDED, got)) from error
    # End the connection with the block, and leave the signals to the caller meanwhile.
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_signal)  # Ray's handler would abort the process
        yield is_own
    finally:
        ray.shutdown()


def _reachable(address: str) -> str:
    """Return the address; `local` if none is given and none answers.

    Raises `UsageError` if no Ray cluster answers, another service answers, or the cluster has another token. `ray.init`
    would retry for a minute or more, and print a line of its C++ code every second.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import find_bootstrap_address

    target = address
    if address in ("", "auto"):  # the address file of `ray start` stays when its cluster is killed
        target = find_bootstrap_address(None) or "local"
    if target == "local":
        return address
    # Refuse a malformed address in the name of its variable, which Ray would not mention.
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        raise UsageError(must("RAY_ADDRESS", _NEEDED, address))
    # Ask twice, with a time limit: whether anything listens, and whether it is Ray with this token.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN).close()
        with init_grpc_channel(target) as channel:  # with TLS and token according to RAY_USE_TLS and RAY_AUTH_MODE
            grpc.channel_ready_future(channel).result(ANSWERS_WITHIN)
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=ANSWERS_WITHIN)
    except (OSError, OverflowError) as error:
        # Without RAY_ADDRESS, a dead cluster in the address file is no mistake.
        if not address:
            return "local"
        raise UsageError(must("RAY_ADDRESS", _NEEDED, f"{address}: {first_line(error)}")) from error
    except (grpc.FutureTimeoutError, grpc.RpcError) as error:
        code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.UNIMPLEMENTED
        if code is grpc.StatusCode.UNIMPLEMENTED:  # another kind of service answered
            got = f"{address or target}, where something else listens"
            raise UsageError(must("RAY_ADDRESS", _NEEDED, got)) from None
        if code is grpc.StatusCode.UNAUTHENTICATED:
            got = f"RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE', 'nothing')} and another token or none"
            needed = "be token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH give the token of the cluster at"
            raise UsageError(must("RAY_AUTH_MODE", f"{needed} {address or target}", got)) from None
    return address
