"""The ranks of a run: their process group, who prints, and how they exit, together or alone.

The group comes first, before any configuration is read, so that one rank reports a user's mistake in one line while
the others exit with the same code, instead of each rank printing its own traceback. A rank that fails alone shows its
traceback; the ranks that fail for want of it let torchrun end them, or say which rank it was, once for each node.
"""

import json
import logging
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils.logging import disable_progress_bar

from verl_ext.data.dataset import Ranks
from verl_ext.redaction import redacted_text
from verl_ext.values import first_line

Answer = TypeVar("Answer")

USER_ERROR = 2
TRAINING_FAILED = 3
_TORCHRUN_NOTICES = 5.0  # seconds until torchrun ends the ranks of a node where one has failed, and more
_STORE_ANSWERS = 5.0  # seconds
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FAILURE = "verl_ext/failure"  # in the store of the ranks
last_acts = ExitStack()  # done where this process ends in order, or at once but of its own accord
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
    # torch's flight recorder keeps the last collectives, for a run that hangs.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))
    _default_to_one_rank()
    _silence_upstream()
    if not sys.stderr.isatty():
        disable_progress_bar()  # transformers', which writes control characters
    # verl imports Megatron where it is installed: seconds, and pages of warnings, for an engine that is not used here.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    if os.environ["RANK"] != "0":
        _be_quiet()
    with failures_reported():
        if accelerator() is None:
            # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
            dist.init_process_group("gloo", timeout=LONG)
        else:
            from verl.utils.distributed import initialize_global_process_group

            initialize_global_process_group(int(LONG.total_seconds()))
    try:
        yield
    finally:
        last_acts.close()
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
def failures_reported() -> Iterator[None]:
    """An exception inside ends this rank: with its traceback where it is the first, else for want of the first.

    NCCL's watchdog ends a rank whose collective takes too long with lines of its own.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        words = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            _end_with_the_others(re.sub(r"\[/\S+:\d+\] ", "", first_line(error)).partition(". ")[0])
        elif _is_first_failure(words):
            print(redacted_text(traceback.format_exc()), end="", file=sys.stderr)
            exit_this_rank(f"{words} (its traceback is above)", 1)
        else:
            _end_with_the_others(words)


def _is_first_failure(words: str) -> bool:
    """Whether no rank has failed before, which is then known to be this one."""

    def tell(store: dist.Store) -> bool:
        first = store.add(f"{_FAILURE}s", 1) == 1
        if first:
            store.set(_FAILURE, f"rank {dist.get_rank()} on {socket.gethostname()} failed ({words})")
        return first

    return _ask_store(tell) is not False


def _first_failure() -> str | None:
    """Which rank failed first and why, where it could say so."""
    return _ask_store(lambda store: store.get(_FAILURE).decode() if store.check([_FAILURE]) else None)


def _ask_store(question: Callable[[dist.Store], Answer]) -> Answer | None:
    """The answer of the store of the ranks; None without one, or where it is gone or out of reach.

    In a thread of its own: a host that is out of reach keeps its caller waiting for ever.
    """
    answers: list[Answer] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # no group yet, or its store is gone
            answers.append(question(dist.distributed_c10d._get_default_store()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_ANSWERS)
    return answers[0] if answers else None


def _end_with_the_others(why: str) -> NoReturn:
    """End a rank that cannot go on because another one ended.

    Where that was on this node, torchrun names it and ends the others, which say nothing; where it was on another node,
    one rank of this node says so, and torchrun ends the others then.
    """
    first = _first_failure()  # now: the store may end with the rank
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_TORCHRUN_NOTICES)
        let_the_first_speak(2 * _TORCHRUN_NOTICES)
    told = first or (
        f"a collective failed or took longer than trainer.nccl_timeout ({why}): another rank or host ended, or the "
        "network between them"
    )
    exit_this_rank(f"{told}; the same command resumes from the last checkpoint", TRAINING_FAILED, first is not None)


def let_the_first_speak(seconds: float) -> None:
    """On all but the first rank of a node: leave torchrun so long to end this one, once the first has said why."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(seconds)


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
    """End the run on every rank, which must all call this: rank 0 says why, all exit with ``code``.

    Under torchrun the first rank of each node does for all of them: torchrun describes each that does not exit with 0.
    """
    if dist.get_rank() == 0:
        print(f"error: {redacted_text(message)}", file=sys.stderr, flush=True)
        _tell_torchrun(message)
    dist.barrier()  # no rank leaves, and has torchrun stop the others, before the line is out
    raise SystemExit(code_of_rank(code))


def code_of_rank(code: int) -> int:
    """What this rank exits with where all ranks end together with a code."""
    return code if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] == "0" else 0


def exit_this_rank(message: str, code: int, of_another: bool = False) -> NoReturn:
    """End this rank at once, for what the others do not know of: they wait for it, until torchrun stops them.

    of_another: the message says which rank is meant.
    """
    rank = "" if of_another else f"rank {os.environ.get('RANK', 0)}: "
    with suppress(OSError):  # a terminal or a pipe that is gone
        print(f"\nerror: {rank}{redacted_text(message)}", file=sys.stderr)  # below a progress bar
    _tell_torchrun(message)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process and its loaders without a word, and without waiting for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    with suppress(OSError):
        last_acts.close()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(code)  # leaving the process group in order would wait for the others


def _tell_torchrun(message: str) -> None:
    """Have torchrun's closing lines give the reason, in the form of torch.distributed.elastic's error files."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        facts = {"message": {"message": redacted_text(message), "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(facts), encoding="utf-8")


def _default_to_one_rank() -> None:
    """What torchrun would have set, for ``python -m``; ends with a line where a scheduler has set a part of it."""
    if missing := [name for name in _OF_TORCHRUN if name not in os.environ]:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            print(
                f"error: ranks must be started by torchrun (launch/node.sh); got WORLD_SIZE={ranks} without "
                f"{', '.join(missing)}",
                file=sys.stderr,
            )
            raise SystemExit(USER_ERROR)
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
    disable_progress_bar()  # transformers'
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when datasets loads
