"""The ranks of a run: process group, output, joint and single exits.

The process group starts before any configuration is read, so that one rank can report a user's mistake in one line
while the others exit with the same code. Failures end a run in these ways:

    user_errors_end_the_run    ValueError, OSError on any rank      all ranks exit with 2, rank 0 prints the first
    failures_reported          an Ending                            as it says: all ranks together, or this one at once
                               any other exception                  the first rank prints its traceback and exits with 1
                               a collective that fails              this rank exits with 3, naming the first failed rank
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

from verl_ext.data.tokenized.ranks import Ranks
from verl_ext.launch.protocol import USER_ERROR, Ending
from verl_ext.options import first_line, must
from verl_ext.redaction import redacted_text

Answer = TypeVar("Answer")

_TORCHRUN_NOTICES = 5.0  # seconds, with a margin, until torchrun ends the ranks of a node with a failed rank
_STORE_ANSWERS = 5.0  # seconds
_TORCHRUN_SETS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FAILURE = "verl_ext/failure"  # the key in the store of the ranks
at_exit = ExitStack()  # callbacks for the end of this process, unless it is killed
LONG = timedelta(hours=10)  # as in verl, because ranks wait for one that tokenizes, reads weights or writes files


def accelerator() -> str | None:
    """Return ``cuda`` or ``npu`` if this process sees one, else None."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else None


@contextmanager
def process_group() -> Iterator[None]:
    """Join torchrun's ranks, or be the only rank, during the block."""
    # verl chooses its platform once, and the CPU's only if this variable names it.
    if accelerator() is None:
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    # torch's flight recorder keeps the last collectives in case the run hangs.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))
    _default_to_one_rank()
    _silence_upstream()
    if not sys.stderr.isatty():
        disable_progress_bar()  # of transformers, which writes control characters
    # verl imports Megatron if it is installed; this takes seconds and prints pages of warnings for an unused engine.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    if os.environ["RANK"] != "0":
        _silence_this_rank()
    # A rank without a GPU of its own would fail later, while the others wait for it.
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if accelerator() == "cuda" and ranks > gpus:
        print("error:", must("ranks (nproc)", f"be at most the node's GPUs, {gpus}", ranks), file=sys.stderr)
        raise SystemExit(USER_ERROR)
    with failures_reported():
        if accelerator() is None:
            # verl would request "cpu:gloo,cpu:gloo", which torch refuses.
            dist.init_process_group("gloo", timeout=LONG)
        else:
            from verl.utils.distributed import initialize_global_process_group

            initialize_global_process_group(int(LONG.total_seconds()))
    try:
        yield
    finally:
        at_exit.close()
        dist.destroy_process_group()


def limit_collectives(seconds: int, meshes: Iterable[DeviceMesh]) -> None:
    """Limit the time of the device's collectives over ranks and `meshes`.

    On a GPU nothing else changes: over gloo, ranks still wait for one that tokenizes, or writes or copies a checkpoint,
    which may take hours. On a CPU all collectives use gloo and this one limit.
    """
    from verl.utils.device import get_device_name  # only after VERL_PLATFORM is set

    device = torch.device(get_device_name())
    for group in {dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())}:
        assert group is not None
        group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


@contextmanager
def user_errors_end_the_run() -> Iterator[None]:
    """End the run if any rank raises a ValueError or OSError.

    Rank 0 prints the first one. Collective: every rank leaves the block before any rank goes on.
    """
    mistake: str | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        mistake = str(error)
    first = next((each for each in RunRanks().gather(mistake) if each is not None), None)
    if first is not None:
        end(Ending(first, USER_ERROR))


@contextmanager
def failures_reported() -> Iterator[None]:
    """End this rank after an exception, with one message per run.

    The first rank that fails prints its traceback; the others name that rank and exit. If a collective takes too long,
    NCCL's watchdog ends the rank with its own lines.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        if isinstance(error, Ending):
            end(error)
        words = f"{type(error).__name__}: {first_line(error)}"

        def fail_first(store: dist.Store) -> bool:
            is_first = store.add(f"{_FAILURE}s", 1) == 1
            if is_first:
                store.set(_FAILURE, f"rank {dist.get_rank()} on {socket.gethostname()} failed ({words})")
            return is_first

        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            _end_with_the_others(re.sub(r"\[/\S+:\d+\] ", "", first_line(error)).partition(". ")[0])
        elif _ask_store(fail_first) is not False:  # without a store, this rank counts as the first
            print(redacted_text(traceback.format_exc()), end="", file=sys.stderr)
            end(Ending(f"{words} (its traceback is above)", 1, "rank"))
        else:
            _end_with_the_others(words)


def _ask_store(question: Callable[[dist.Store], Answer]) -> Answer | None:
    """Ask the ranks' store; return None if it is out of reach.

    The question runs in its own thread, because a host that is out of reach would block its caller forever.
    """
    answers: list[Answer] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # there is no group yet, or its store is gone
            answers.append(question(dist.distributed_c10d._get_default_store()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_ANSWERS)
    return answers[0] if answers else None


def _end_with_the_others(why: str) -> NoReturn:
    """End a rank that cannot go on because another rank ended.

    If that rank was on this node, torchrun names it and ends the others, which print nothing. If it was on another
    node, one rank of this node reports it, and torchrun then ends the others.
    """
    # Ask now, because the store may end with the rank.
    first = _ask_store(lambda store: store.get(_FAILURE).decode() if store.check([_FAILURE]) else None)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_TORCHRUN_NOTICES)
        wait_unless_local_rank0(2 * _TORCHRUN_NOTICES)
    reason = first or (
        f"a collective failed or took longer than trainer.nccl_timeout ({why}): another rank or host ended, or the "
        "network between them"
    )
    line = f"{reason}; the same command resumes from the last checkpoint"
    end(Ending(line, scope="rank" if first is None else "other"))


def wait_unless_local_rank0(seconds: float) -> None:
    """Let a node's first rank print, and torchrun end the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(seconds)


class RunRanks(Ranks):
    """All ranks of the run, for datasets that the ranks read together."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def guard(self) -> AbstractContextManager[None]:
        """Return :func:`user_errors_end_the_run`."""
        return user_errors_end_the_run()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, values: NDArray[Any]) -> None:
        """Sum `values` over the ranks, in place."""
        dist.all_reduce(torch.from_numpy(values))


def end(ending: Ending) -> NoReturn:
    """End the run with all ranks, or this process and its loaders at once.

    torchrun stops the others if a rank leaves earlier, and it describes each rank that does not exit with 0. So ranks
    that end together wait for each other, and only the first one of a node returns the code.
    """
    if ending.scope == "run":
        if ending.message is not None and dist.get_rank() == 0:
            print(f"error: {redacted_text(ending.message)}", file=sys.stderr, flush=True)
            _tell_torchrun(ending.message)
        dist.barrier()
        is_described = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] == "0"
        raise SystemExit(ending.code if is_described else 0)
    # The terminal or the pipe may be gone, and nothing may keep this rank from its end.
    with suppress(OSError):
        if ending.message is not None:
            rank = f"rank {os.environ.get('RANK', 0)}: " if ending.scope == "rank" else ""
            print(f"\nerror: {rank}{redacted_text(ending.message)}", file=sys.stderr)  # below a progress bar
            _tell_torchrun(ending.message)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    with suppress(OSError):
        at_exit.close()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(ending.code)  # an orderly exit from the process group would wait for the others


def _tell_torchrun(message: str) -> None:
    """Pass the reason to torchrun's closing lines through its error file."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        facts = {"message": {"message": redacted_text(message), "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(facts), encoding="utf-8")


def _default_to_one_rank() -> None:
    """Set torchrun's variables for one rank; refuse an incomplete larger world."""
    if missing := [name for name in _TORCHRUN_SETS if name not in os.environ]:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            got = f"WORLD_SIZE={ranks} without {', '.join(missing)}"
            print("error:", must("ranks", "be started by torchrun (launch/node.sh)", got), file=sys.stderr)
            raise SystemExit(USER_ERROR)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(single, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _silence_upstream() -> None:
    """Silence upstream messages that nobody can act on; keep all others."""
    warnings.filterwarnings("ignore", message=".* engine is not available")  # verl, about engines that are not used
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)
    # torch's advice about a skipped first step; fp16's scale is often too high at the start
    warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step")
    for name in ("configuration_utils", "modeling_utils"):  # about an argument and a config key of verl
        logging.getLogger(f"transformers.{name}").addFilter(lambda line: "`torch_dtype` is" not in line.getMessage())
    # about an unused tensor-parallel plan: "The following layers were not sharded"
    logging.getLogger("transformers.integrations.tensor_parallel").setLevel(logging.ERROR)
    logging.getLogger("verl.plugin.platform.platform_manager").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # about a kernel of inference
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # FSDP2 triggers it once per run


def _silence_this_rank() -> None:
    """Silence this rank except for errors; rank 0 prints the same."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    disable_progress_bar()  # of transformers
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets reads it during its import


def print_on_rank0(lines: Iterable[str], stream: Any = None) -> None:
    """Print lines on rank 0 alone, with secrets masked."""
    if dist.get_rank() == 0:
        for line in lines:
            print(redacted_text(line), file=stream or sys.stdout, flush=True)
