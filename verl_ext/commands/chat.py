"""The command `verl-ext chat`: a conversation in the terminal with a model that was trained.

    a run, or a global_step_N        its last checkpoint, exported into a temporary folder unless it holds a model
    an adapter folder of PEFT        merged into its base, likewise
    an export, a folder, a Hub name  as it is

Plain transformers renders the chat and generates: the template and the tokens that end an answer are those of the
folder, which for a trained model are those of its data.
"""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from verl_ext.checkpoint.layout import EXPORT, MANIFEST, saved_folders
from verl_ext.commands.command_line import command
from verl_ext.options import REQUIRED, DataError, Options, first_line, must, option
from verl_ext.text.records.reasoning import REASONING_TAGS, decode_answer, split_reasoning

_ADAPTER = "adapter_config.json"
_NEW = "/new"


@dataclass(frozen=True)
class ChatCommandOptions(Options):
    """Talk to a run's last checkpoint, an export, an adapter folder, or any other model.

    Each line is a turn. Ctrl-C ends an answer, /new starts a new conversation, and Ctrl-D ends the program. With
    prompt= it prints one answer and ends. A model without a chat template continues the text of each line.
    """

    path: str = option(
        REQUIRED, "the run, checkpoint, export, adapter folder or model; also as the first word", required=True
    )
    prompt: str | None = option(None, "the only turn: its answer is printed, and the program ends")
    system: str | None = option(None, "a system message before the first turn")
    temperature: float = option(0.7, "sampling temperature; 0: always the most probable token", least=0)
    top_p: float = option(0.95, "total probability of the most probable tokens to sample from", above=0, most=1)
    max_new_tokens: int = option(2048, "maximum number of tokens of an answer", least=1)
    seed: int = option(0, "seed of the sampling", least=0)
    apply_chat_template_kwargs: dict[str, Any] = option({}, "template arguments, e.g. {enable_thinking: false}")
    base: str | None = option(None, "base of an adapter folder; null: that of its adapter_config.json")
    trust_remote_code: bool = option(False, "true: run Python code that comes with the model")

    def problems(self) -> Iterator[str]:
        """Yield a line if no model can be at the path, and for an empty prompt."""
        if self.prompt is not None and not self.prompt.strip():
            yield must("prompt", "be a text", "nothing")
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            if folder.exists() or folder.is_absolute() or self.path.startswith((".", "~")) or self.path.count("/") != 1:
                yield must("path", "be a folder with a model, or a name of the Hub", self.path)
        elif _checkpoint(folder) is not None:
            return
        elif not any((folder / name).is_file() for name in ("config.json", _ADAPTER)):
            yield f"path must hold a checkpoint (global_step_N), a config.json or an {_ADAPTER}; {self.path} has none"
        elif not any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
            yield f"path must hold weights beside its config (*.safetensors or *.bin); {self.path} has none"


class ChatModel:
    """A model with its tokenizer, on the GPU if there is one.

    Raises DataError with one line if the folder holds none that transformers can load.
    """

    def __init__(self, folder: str, options: ChatCommandOptions) -> None:
        import torch
        import transformers

        from verl_ext.config.check import model_positions
        from verl_ext.plugin import register_architectures

        register_architectures()

        transformers.utils.logging.set_verbosity_error()
        on_gpu, trusted = torch.cuda.is_available(), options.trust_remote_code
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto" if on_gpu else torch.float32, trust_remote_code=trusted
            )
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            raise DataError(f"{options.path}: transformers cannot load the model: {first_line(error)}") from error
        self._model = self._model.eval().to("cuda" if on_gpu else "cpu")
        self._model.config.get_text_config().output_router_logits = False  # with which a cache cannot be read
        self._positions = model_positions(self._model.config) or sys.maxsize
        self._options = options
        torch.manual_seed(options.seed)

    def prompt(self, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        """Return the text before the next answer, and its tokens."""
        tokenizer, kwargs = self.tokenizer, self._options.apply_chat_template_kwargs
        if tokenizer.chat_template is None:
            text = messages[-1]["content"]
            return text, tokenizer(text)["input_ids"]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
        except Exception as error:  # a template may raise anything, such as that it knows no system message
            raise DataError(f"the chat template refuses the conversation: {first_line(error)}") from error
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer(self, ids: list[int], tell: Callable[[str], None]) -> str:
        """Generate until an end token, the last position or Ctrl-C, and return the whole text.

        tell: called with the text so far. Raises DataError if the prompt leaves no position for an answer.
        """
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        options, own = self._options, self._model.generation_config
        if len(ids) >= self._positions:
            needed = f"have fewer tokens than the model's {self._positions:,} positions"
            raise DataError(must("the conversation", needed, f"{len(ids):,}"))
        ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        stops = sorted({token for token in (*ends, self.tokenizer.eos_token_id) if token is not None})
        draws = {"temperature": options.temperature, "top_p": options.top_p} if options.temperature else {}
        # The options decide alone: penalties and lengths of the folder's own config would apply otherwise.
        config = GenerationConfig(
            max_new_tokens=min(options.max_new_tokens, self._positions - len(ids)),
            do_sample=bool(draws),
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            **draws,
        )
        self._model.generation_config = config
        # The first Ctrl-C ends the answer after its token, a second one the program.
        text, is_stopped = "", False

        def stop(*_: Any) -> None:
            nonlocal is_stopped
            if is_stopped:
                raise KeyboardInterrupt
            is_stopped = True

        def watch(tokens: Any, scores: Any, **_: Any) -> Any:
            nonlocal text
            answer = tokens[0, len(ids) :].tolist()
            text = decode_answer(self.tokenizer, answer[:-1] if answer[-1] in stops else answer)
            tell(text)
            return torch.full((1,), is_stopped, device=tokens.device)

        inputs = torch.tensor([ids], device=self._model.device)
        before = signal.signal(signal.SIGINT, stop)
        try:
            with torch.no_grad():
                watches = StoppingCriteriaList([watch])
                self._model.generate(inputs, attention_mask=torch.ones_like(inputs), stopping_criteria=watches)
        finally:
            signal.signal(signal.SIGINT, before)
            self._model.generation_config = own
        return text


class AnswerPrinter:
    """Prints an answer while it grows, its reasoning dimmed and on lines of its own.

    opening: the tag of a reasoning that the prompt has begun; "" for none.
    """

    def __init__(self, console: Any, opening: str) -> None:
        self._console, self._opening = console, opening
        self._printed = ["", ""]  # of the reasoning and of the answer

    def tell(self, text: str, is_whole: bool = False) -> None:
        """Print what is new in the text so far; the last characters wait while they may begin a tag."""
        parts = split_reasoning(self._opening + text)
        for number, (part, style) in enumerate(zip(parts, ("dim", ""), strict=True)):
            is_settled = is_whole or (number == 0 and parts[1])
            part = part if is_settled else part[: len(part) - _unsettled(part)]
            printed = self._printed[number]
            if number == 1:
                part = part.lstrip() if self._printed[0] else part
                if part and not printed and self._printed[0]:
                    self._console.print()
            if part.startswith(printed) and len(part) > len(printed):
                new = part[len(printed) :]  # as it is: print() of a console turns :key: and tabs into others
                self._console.file.write(f"\x1b[2m{new}\x1b[0m" if style and self._console.is_terminal else new)
                self._console.file.flush()
                self._printed[number] = part


def _unsettled(text: str) -> int:
    """Return the number of last characters that a later token may change, or that may begin a closing tag."""
    if text.endswith("\ufffd"):  # half of a character
        return 1
    tags = [tag for pair in REASONING_TAGS for tag in pair]
    return max((n for tag in tags for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)


def chat(options: ChatCommandOptions) -> str:
    """Hold a conversation, or print one answer."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    console = Console(file=sys.stdout)
    with ExitStack() as stack:
        disable_progress_bar()
        model = ChatModel(_folder(options, stack), options)
        messages: list[dict[str, str]] = []
        for turn in [options.prompt] if options.prompt is not None else _turns():
            if turn == _NEW or not messages:
                messages = [{"role": "system", "content": options.system}] if options.system is not None else []
            if turn == _NEW or not turn.strip():
                continue
            messages.append({"role": "user", "content": turn})
            # At a terminal a turn that cannot be answered costs no conversation.
            try:
                text, ids = model.prompt(messages)
                opening = next((tag for tag, _ in REASONING_TAGS if text.rstrip().endswith(tag)), "")
                printer = AnswerPrinter(console, opening)
                answer = model.answer(ids, printer.tell)
            except DataError as error:
                if options.prompt is not None or not sys.stdin.isatty():
                    raise
                print(f"error: {error}; the line is dropped, and {_NEW} starts again", file=sys.stderr)
                messages.pop()
                continue
            printer.tell(answer, is_whole=True)
            console.print()
            # Templates print earlier reasoning by a field of its own, or leave it out.
            reasoning, answer = split_reasoning(opening + answer)
            thought = {"reasoning_content": reasoning} if reasoning else {}
            messages.append({"role": "assistant", "content": answer.strip(), **thought})
    return ""


def _turns() -> Iterator[str]:
    """Yield the lines that the user writes, until Ctrl-D; Ctrl-C drops the line at a terminal."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (edits and recalls lines)

        print(f"Ctrl-C ends an answer, {_NEW} starts again, Ctrl-D leaves.")
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print()


def _checkpoint(folder: Path) -> Path | None:
    """Return a checkpoint's folder itself, or the last one of a run; None for any other folder."""
    if (folder / MANIFEST).is_file():
        return folder
    return next(reversed(saved_folders(folder)), None)


def _folder(options: ChatCommandOptions, stack: ExitStack) -> str:
    """Return a folder or name that transformers loads; what has to be exported for it goes with the stack."""
    folder = Path(options.path).expanduser()
    checkpoint = _checkpoint(folder) if folder.is_dir() else None
    if checkpoint is not None and any((checkpoint / EXPORT).glob("model*.safetensors*")):
        return str(checkpoint / EXPORT)
    if checkpoint is None and not (folder / _ADAPTER).is_file():
        return options.path if not folder.is_dir() else str(folder)
    from verl_ext.commands.export import ExportOptions, export

    output = stack.enter_context(TemporaryDirectory(prefix="verl-ext-chat-"))
    print(f"exporting {checkpoint or folder} …", file=sys.stderr, flush=True)
    values = {"checkpoint": str(checkpoint or folder), "output_dir": f"{output}/model", "base": options.base}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads the checkpoint
        export(ExportOptions.read(values, trust_remote_code=options.trust_remote_code))
    return f"{output}/model"


main = command("chat", ChatCommandOptions, chat, example="RUN [prompt='…'] [key=value …]", first="path")
