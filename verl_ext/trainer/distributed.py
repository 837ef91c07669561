"""The ranks of a run: their process group, who prints, and how they exit, together or when torchrun is gone.

The group comes first, before any configuration is read, so that one rank reports a user's mistake in one line while
the others exit with the same code, instead of each rank printing its own traceback.
"""

import logging
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from verl_ext.data.dataset import Ranks
from verl_ext.values import first_line

USER_ERROR = 2
TRAINING_FAILED = 3
_WATCH_SECONDS = 1.0
LONG = timedelta(hours=10)  # verl's own: ranks wait for one that tokenizes, reads weights or writes files


def accelerator() -> str | None:
    """``cuda`` or ``npu`` where one is visible to this process, else None."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else None


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that torchrun started, or be the only one; gloo on CPU, verl's choice on accelerators."""
    if accelerator() is None:
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    _default_to_one_rank()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_torchrun()
    _silence_upstream()
    # verl imports Megatron where it is installed: seconds, and pages of warnings, for an engine that is not used here.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    if os.environ["RANK"] != "0":
        _be_quiet()
    with lost_ranks_reported():
        if accelerator() is None:
            # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
            dist.init_process_group("gloo", timeout=LONG)
        else:
            from verl.utils.distributed import initialize_global_process_group

            initialize_global_process_group(int(LONG.total_seconds()))
    try:
        yield
    finally:
        dist.destroy_process_group()


def limit_collectives(seconds: int, meshes: Iterable[DeviceMesh]) -> None:
    """Let a collective on the device take so long at most, from now on: one of all ranks, or of a group of `meshes`.

    On a GPU nothing else changes: ranks wait over gloo for one that writes or copies a checkpoint, as for one that
    tokenizes, and that may take hours. On a CPU it is all gloo, and one limit.
    """
    from verl.utils.device import get_device_name  # not before VERL_PLATFORM is set

    device = torch.device(get_device_name())
    for group in {dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())}:
        assert group is not None
        group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


@contextmanager
def user_errors_end_the_run() -> Iterator[None]:
    """A ValueError or OSError inside, on any rank, ends the run on all: rank 0 prints the first, each exits with 2.

    Collective: every rank leaves the block before any goes on.
    """
    mistake: str | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        mistake = str(error)
    mistakes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(mistakes, mistake)
    first = next((m for m in mistakes if m is not None), None)
    if first is not None:
        exit_all_ranks(first, USER_ERROR)


@contextmanager
def lost_ranks_reported() -> Iterator[None]:
    """A collective that fails inside, or takes longer than it may, ends this rank with one line and TRAINING_FAILED.

    Every rank sees that by itself, so each says it. NCCL's watchdog ends a rank with lines of its own.
    """
    try:
        yield
    except RuntimeError as error:
        failed = isinstance(error, dist.DistError) or "gloo/" in str(error)
        if not failed or os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        why = re.sub(r"\[/\S+:\d+\] ", "", first_line(error)).partition(". ")[0]
        exit_this_rank(
            f"a collective failed or took longer than trainer.nccl_timeout ({why}): another rank or host ended, or the "
            "network between them; the same command resumes from the last checkpoint",
            TRAINING_FAILED,
        )


class RunRanks(Ranks):
    """All ranks of the run, for datasets that read their data together."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def guard(self) -> AbstractContextManager[None]:
        """:func:`user_errors_end_the_run`."""
        return user_errors_end_the_run()

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, values: NDArray[Any]) -> None:
        dist.all_reduce(torch.from_numpy(values))


def exit_all_ranks(message: str, code: int) -> NoReturn:
    """End the run on every rank, which must all call this: rank 0 says why, all exit with ``code``."""
    if dist.get_rank() == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    dist.barrier()  # no rank leaves, and has torchrun stop the others, before the line is out
    raise SystemExit(code)


def exit_this_rank(message: str, code: int) -> NoReturn:
    """End this rank at once, for what the others do not know of: they wait for it, until torchrun stops them."""
    with suppress(OSError):  # a terminal or a pipe that is gone
        print(f"\nerror: rank {os.environ['RANK']}: {message}", file=sys.stderr)  # below a progress bar
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(code)  # leaving the process group in order would wait for the others


def _end_with_torchrun() -> None:
    """Leave when torchrun, which started this rank, has been killed and could not stop it.

    The rank would train on, and write, beside the run that takes its place. Only a parent that is torchrun means that:
    under Ray, srun or a notebook a run may outlive its parent.
    """
    torchrun = os.getppid()

    def watch() -> None:
        while os.getppid() == torchrun:
            time.sleep(_WATCH_SECONDS)
        exit_this_rank(f"torchrun (process {torchrun}) is gone, which ends its ranks", TRAINING_FAILED)

    threading.Thread(target=watch, name="torchrun-watch", daemon=True).start()


def _default_to_one_rank() -> None:
    """What torchrun would have set, for ``python -m``."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(single, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _silence_upstream() -> None:
    """Leave out what upstream says to everybody and nobody can act on; everything else is still heard."""
    warnings.filterwarnings("ignore", message=".* engine is not available")  # verl: engines that nobody asked for
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)
    # torch's advice, where a first step is skipped: fp16's scale is often too high at the start
    warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step")
    for name in ("configuration_utils", "modeling_utils"):  # of an argument and a config key of verl's
        logging.getLogger(f"transformers.{name}").addFilter(lambda line: "`torch_dtype` is" not in line.getMessage())
    logging.getLogger("verl.plugin.platform.platform_manager").setLevel(logging.WARNING)
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # FSDP2 asks it once per run


def _be_quiet() -> None:
    """Ranks above 0 print nothing but errors: verl, transformers and datasets print the same line on every rank."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update(TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")  # read when tqdm and transformers load
