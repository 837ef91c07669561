"""The models whose answers are judged: behind an endpoint, in a transformers folder, in a checkpoint, or in a file.

Each has the method `ask` of :class:`verl_ext.endpoint.client.Client`, which serves models behind an endpoint.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl_ext.endpoint.answer import CUT, DONE, FAILED, OUTCOMES, UNPARSABLE, Answer, Usage
from verl_ext.endpoint.client import Messages, SamplingOptions
from verl_ext.endpoint.store import Store
from verl_ext.files import fingerprint
from verl_ext.judging.task import read_rows
from verl_ext.text.tokenized import file_facts
from verl_ext.values import DataError, UsageError, first_line

# The outcomes in an answers.jsonl of cases without an answer; their text is empty or is not an answer.
_WITHOUT_ANSWER = tuple(outcome for outcome in OUTCOMES if outcome not in (DONE, CUT))
_MOST_TOKENS = 4096  # most tokens of an answer if the sampling sets no limit


class LocalModel:
    """A folder that plain transformers loads, or a checkpoint of this project, which is exported temporarily.

    The model answers one question at a time, on the GPU if there is one. Finished answers are in the store, so a run
    that continues does not load the model for them.
    """

    def __init__(self, path: str, store: Store, key: str) -> None:
        """Take an existing folder. `key`: the name of the option in error messages."""
        self.path, self.store, self._key = Path(path), store, key
        if not self.path.is_dir():
            raise UsageError(f"{key} must be an existing folder of a model or a checkpoint; got {path}")
        self._facts = file_facts([str(self.path)])
        self._resources = ExitStack()
        self._model: Any = None

    async def __aenter__(self) -> "LocalModel":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._resources.close()
        self._model = None

    async def ask(self, record: str, stage: str, messages: Messages, sampling: SamplingOptions) -> Answer:
        """Return the model's answer, from the store if it has it. Raises UsageError if the folder is no model."""
        question = [self._facts, record, stage, [dict(message) for message in messages], vars(sampling)]
        key = fingerprint(question)
        if stored := self.store.find(key):
            return stored
        answer = self._generated(record, messages, sampling)
        self.store.add(key, record, stage, answer)
        return answer

    def _generated(self, record: str, messages: Messages, sampling: SamplingOptions) -> Answer:
        from verl_ext.answers.generation import Sampling, generate

        if self._model is None:
            self._load()
        chat: Any = list(messages)
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        seed = int.from_bytes(blake2b(f"{sampling.seed}\0{record}".encode(), digest_size=4).digest(), "little")
        most = sampling.max_tokens or _MOST_TOKENS
        drawn = Sampling(most, self._stops, sampling.temperature or 0.0, sampling.top_p or 1.0, seed)
        (ids,) = generate(self._model, [prompt], drawn, self._model.device)
        said = str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
        outcome = UNPARSABLE if not said else DONE if len(ids) < most else CUT  # `ids` leaves out the stop token
        reason = {CUT: "max_tokens ended the answer", UNPARSABLE: "the answer is empty"}.get(outcome, "")
        usage = Usage(len(prompt), 0, len(ids))
        return Answer(outcome, said, reason=reason, usage=usage, model=str(self.path), seed=seed)

    def _load(self) -> None:
        """Load the folder; first export a checkpoint into a temporary folder, which `__aexit__` removes."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from verl_ext.checkpoint.export import export_checkpoint
        from verl_ext.checkpoint.layout import EXPORT, saved_folders

        folder = self.path
        if not (folder / "config.json").is_file():  # a checkpoint, or a run, whose last checkpoint is taken
            folder = [self.path, *saved_folders(self.path)][-1] / EXPORT
        if not any(folder.glob("*.safetensors")) and folder != self.path:
            exported = Path(self._resources.enter_context(tempfile.TemporaryDirectory())) / "model"
            export_checkpoint(str(self.path), str(exported), False, None, "saved", 5.0)
            folder = exported
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        except (OSError, ValueError) as error:
            needed = f"{self._key} must hold a model that transformers loads"
            raise UsageError(f"{needed}; got {self.path}: {first_line(error)}") from error
        if self._tokenizer.chat_template is None:
            raise UsageError(f"{self._key} must have a chat template, by which it is asked; {self.path} has none")
        ends = model.generation_config.eos_token_id
        ends = [*(ends if isinstance(ends, list) else [ends]), self._tokenizer.eos_token_id]
        self._stops = tuple(dict.fromkeys(end for end in ends if end is not None))
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class Predictions:
    """Answers that were made elsewhere: LongWriter's and EvalScope's pred.jsonl, or an answers.jsonl of this command.

    An answer belongs to the case with the same name or the same prompt.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path, self._key = path, key
        self._answers: dict[str, str] = {}
        for number, row in enumerate(read_rows(path, key, {}), start=1):
            said, asked = row.get("response", row.get("answer")), row.get("case", row.get("prompt"))
            if not isinstance(said, str) or not isinstance(asked, str):
                needed = f"{key} must have prompt and response, or case and answer, in every row"
                raise DataError(f"{needed}; row {number} of {path} has not")
            if row.get("outcome") not in _WITHOUT_ANSWER:
                self._answers[asked] = said

    async def __aenter__(self) -> "Predictions":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def ask(self, record: str, stage: str, messages: Messages, sampling: SamplingOptions) -> Answer:
        """Return the file's answer to a case; its outcome is `failed` if there is none."""
        said = self._answers.get(record, self._answers.get(messages[-1]["content"]))
        if said is None:
            return Answer(FAILED, reason=f"{self.path} has no answer to case {record}")
        return Answer(DONE, said)


def named_paths(values: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return an option's {name: path}. Raises UsageError if a path is not a text."""
    for name, path in values.items():
        if not isinstance(path, str) or not path:
            raise UsageError(f"{key}.{name} must be a path; got {path!r}")
    return dict(values)
