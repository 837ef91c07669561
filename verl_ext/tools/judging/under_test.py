"""The models under test: served, in folders or checkpoints, or predictions.

Each has the method `ask` of :class:`verl_ext.tools.endpoint.client.Client`, which serves models behind an endpoint.
"""

import asyncio
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl_ext.cache import fingerprint
from verl_ext.options import DataError, UsageError, must
from verl_ext.text.records.reasoning import decode_answer
from verl_ext.text.tokenizing import file_facts
from verl_ext.tools.endpoint.answer import CUT, FAILED, REFUSED, TOO_LONG, Answer, Usage, answer_from_text
from verl_ext.tools.endpoint.client import Messages, SamplingOptions
from verl_ext.tools.endpoint.local_model import load_model
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.judging.task import read_rows

_MOST_TOKENS = 4096  # most tokens of an answer if the sampling sets no limit
_NOT_ANSWERED = (TOO_LONG, FAILED)  # outcomes in an answers.jsonl
_KNOWN = (CUT, REFUSED)  # those that do not follow from the text
_RULES = 2  # of making an answer from a model's tokens; answers in a store by earlier rules are not used


class LocalModel:
    """A transformers folder, or a checkpoint that is exported temporarily.

    The model answers one question at a time, on the GPU if there is one, in a thread of its own: the judge reads
    earlier answers meanwhile. Finished answers are in the store, so a run that continues does not load the model for
    them.
    """

    def __init__(self, path: str, store: Store, key: str) -> None:
        """Take an existing folder; errors name the option `key`."""
        self.path, self.store, self._key = Path(path), store, key
        if not self.path.is_dir():
            raise UsageError(must(key, "be an existing folder of a model or a checkpoint", path))
        self._facts = file_facts([str(self.path)])
        self._resources = ExitStack()
        self._model: Any = None
        self._turn, self._is_stopped = asyncio.Lock(), threading.Event()

    async def __aenter__(self) -> "LocalModel":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._resources.close()
        self._model = None

    async def ask(
        self, record: str, stage: str, messages: Messages, sampling: SamplingOptions, **request: Any
    ) -> Answer:
        """Return the stored or new answer; raise UsageError without a model.

        request: the `tools` and `extra_body` of :meth:`Client.ask`, of which only template arguments are read.
        """
        question = [_RULES, self._facts, record, stage, [dict(message) for message in messages], vars(sampling)]
        arguments = dict((request.get("extra_body") or {}).get("chat_template_kwargs", {}))
        arguments |= {"tools": [*tools]} if (tools := request.get("tools")) else {}
        key = fingerprint([*question, arguments] if arguments else question)
        async with self._turn:
            if stored := self.store.find(key):
                return stored
            try:
                answer = await asyncio.to_thread(self._generated, record, messages, sampling, arguments)
            except asyncio.CancelledError:  # the thread ends after its token, and nobody waits for its answer
                self._is_stopped.set()
                raise
            self.store.add(key, record, stage, answer)
            return answer

    def _generated(
        self, record: str, messages: Messages, sampling: SamplingOptions, arguments: Mapping[str, Any]
    ) -> Answer:
        from verl_ext.answers.generation import Sampling, generate

        if self._model is None:
            self._load()
        chat: Any = list(messages)
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **arguments)
        prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        seed = int.from_bytes(blake2b(f"{sampling.seed}\0{record}".encode(), digest_size=4).digest(), "little")
        most = sampling.max_tokens or _MOST_TOKENS
        draws = sampling.temperature or 0.0, sampling.top_p or 1.0, seed, self._is_stopped.is_set
        (ids,) = generate(self._model, [prompt], Sampling(most, self._ends, *draws), self._model.device)
        facts: dict[str, Any] = {"usage": Usage(len(prompt), 0, len(ids)), "model": str(self.path), "seed": seed}
        if len(ids) == most:  # `ids` leaves out the stop token
            facts |= {"outcome": CUT, "reason": "max_tokens ended the answer"}
        return answer_from_text(decode_answer(self._tokenizer, ids), **facts)

    def _load(self) -> None:
        """Load the folder, or export a checkpoint into a temporary one.

        `__aexit__` removes that. Raises UsageError if the folder is not a chat model.
        """
        from verl_ext.answers.generation import end_tokens
        from verl_ext.checkpoint.export import ExportForm, export_checkpoint
        from verl_ext.checkpoint.layout import EXPORT, saved_folders
        from verl_ext.text.chat.template import ChatTemplate

        folder = self.path
        if not (folder / "config.json").is_file():  # a checkpoint, or a run, whose last checkpoint is taken
            folder = [self.path, *saved_folders(self.path)][-1] / EXPORT
        # A checkpoint without weights for transformers is exported once, and only for as long as it answers.
        if not any(folder.glob("*.safetensors")) and folder != self.path:
            exported = Path(self._resources.enter_context(tempfile.TemporaryDirectory())) / "model"
            export_checkpoint(ExportForm(str(self.path), str(exported), dtype="saved"))
            folder = exported
        self._tokenizer, model = load_model("AutoModelForCausalLM", folder, self._key, "a model", self.path)
        if self._tokenizer.chat_template is None:
            raise UsageError(f"{self._key} must have a chat template, by which it is asked; {self.path} has none")
        # Answers end where the model was trained to end a turn, or where its own config says so.
        own = model.generation_config.eos_token_id
        template = ChatTemplate(self._tokenizer, None, {})
        self._ends = end_tokens(self._tokenizer, template.turn_ends, *(own if isinstance(own, list) else [own]))
        self._model = model


class Predictions:
    """Answers in LongWriter's or EvalScope's pred.jsonl, or an answers.jsonl.

    An answer belongs to the case with the same name or the same prompt.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path, self._key = path, key
        self._answers: dict[str, Answer] = {}
        for number, row in enumerate(read_rows(path, key, {}), start=1):
            said, asked = row.get("response", row.get("answer")), row.get("case", row.get("prompt"))
            if not isinstance(said, str) or not isinstance(asked, str):
                needed = f"{key} must have prompt and response, or case and answer, in every row"
                raise DataError(f"{needed}; row {number} of {path} has not")
            outcome = row.get("outcome")
            if outcome not in _NOT_ANSWERED:
                facts = {"outcome": outcome, "reason": str(row.get("reason", ""))} if outcome in _KNOWN else {}
                self._answers[asked] = answer_from_text(said, **facts)

    async def __aenter__(self) -> "Predictions":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def ask(self, record: str, stage: str, messages: Messages, sampling: SamplingOptions, **_: Any) -> Answer:
        """Return the file's answer to a case; `failed` without one."""
        answer = self._answers.get(record, self._answers.get(messages[-1]["content"]))
        return answer or Answer(FAILED, reason=f"{self.path} has no answer to case {record}")


def model_paths(values: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return an option's {name: path}; raise UsageError for other values."""
    for name, path in values.items():
        if not isinstance(path, str) or not path:
            raise UsageError(must(f"{key}.{name}", "be a path", path))
    return dict(values)
