"""The Ray cluster that a command or a run works on: one that runs already, or one started here for as long as needed.

with ray_cluster(num_cpus=8):
    ...                  RAY_ADDRESS=host:6379 or auto: that cluster, which goes on afterwards
                         not set: the one that runs on this machine, else one started here, which ends with the block
                         local: one started here, in any case
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
OBJECT_STORE = 128 << 20  # bytes of shared memory: nothing large travels through it

_NEEDED = (
    "RAY_ADDRESS must be host:port of the head of a Ray cluster, or auto, on one of the cluster's machines (ray job"
    " submit starts a command there), or local"
)


@contextlib.contextmanager
def ray_cluster(num_cpus: int) -> Iterator[bool]:
    """Connect to a cluster for the block; yield whether it was started here, on this machine alone.

    num_cpus: of a cluster that is started here. A connection that this process has already is used and kept. Raises
    `UsageError` if there is no cluster at $RAY_ADDRESS, or none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: nothing is sent to its makers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a change that Ray announces to everybody
    import ray  # heavy

    if ray.is_initialized():
        yield False
        return
    address = _checked(os.environ.get("RAY_ADDRESS", ""))
    on_signal = signal.getsignal(signal.SIGTERM)
    # What workers print stays in Ray's own log files: an error that matters is returned by the work itself.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    is_own = address in ("", "local")
    own: dict[str, Any] = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE} if is_own else {}
    try:
        try:
            ray.init(address or None, **quiet, **own)
        except ValueError:
            if address:
                raise
            is_own = False
            ray.init(**quiet)  # one runs on this machine, whose resources are what they are
    except Exception as error:  # of many kinds
        raise UsageError(f"{_NEEDED}; got {address or 'nothing'}: {first_line(error)}") from error
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_signal)  # Ray's handler would abort the process
        yield is_own
    finally:
        ray.shutdown()


def _checked(address: str) -> str:
    """Return the address; `local` if none is given and the cluster that `ray start` made on this machine is gone.

    Raises `UsageError` if no Ray answers, or another service, or a cluster with another token: `ray.init` would ask for
    a minute or more, and print a line of its C++ for each second.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import find_bootstrap_address

    at = address
    if address in ("", "auto"):  # the address that `ray start` has written down stays when its cluster is killed
        at = find_bootstrap_address(None) or "local"
    if at == "local":
        return address
    host, _, port = at.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        raise UsageError(f"{_NEEDED}; got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN).close()
        with init_grpc_channel(at) as channel:  # with TLS and token, as RAY_USE_TLS and RAY_AUTH_MODE say
            grpc.channel_ready_future(channel).result(ANSWERS_WITHIN)
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=ANSWERS_WITHIN)
    except (OSError, OverflowError) as error:
        if not address:
            return "local"
        raise UsageError(f"{_NEEDED}; got {address}: {first_line(error)}") from error
    except (grpc.FutureTimeoutError, grpc.RpcError) as error:
        code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.UNIMPLEMENTED
        if code is grpc.StatusCode.UNIMPLEMENTED:  # by a service of another kind
            raise UsageError(f"{_NEEDED}; got {address or at}, where something else listens") from None
        if code is grpc.StatusCode.UNAUTHENTICATED:
            mode = os.environ.get("RAY_AUTH_MODE", "nothing")
            raise UsageError(
                "RAY_AUTH_MODE must be token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH give the token of the "
                f"cluster at {address or at}; got RAY_AUTH_MODE={mode} and another token or none"
            ) from None
    return address
