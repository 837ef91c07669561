"""ChatRenderer: chats as the text that a template prints, special tokens apart from what users wrote."""

import json
from collections.abc import Iterator
from typing import Any

from verl_ext.commands.tokenize import TokenizeConfig
from verl_ext.text.chat_proof import ProvenChats
from verl_ext.text.chat_template import ChatTemplate
from verl_ext.text.json_records import BadRecord
from verl_ext.text.records import Chat
from verl_ext.text.special_tokens import ChatText, SpecialTokens
from verl_ext.text.tokenizer import check_template, is_template_text, read_template_file
from verl_ext.values import UsageError, first_line


class ChatRenderer:
    """One chat template, and what `turns`, `on_unprinted` and `end_of_turn` make of it."""

    def __init__(self, tokenizer: Any, special: SpecialTokens, config: TokenizeConfig) -> None:
        """Raises `UsageError` where there is no chat template, or none that can be used."""
        template = _template_text(config.chat_template)
        if template is None and not tokenizer.chat_template:
            raise UsageError(
                f"chat_template must be given for chat records: the tokenizer of {config.model.tokenizer} has none"
            )
        self._special, self._config = special, config
        stops = _stop_tokens(tokenizer, config)
        self._chats = ProvenChats(
            ChatTemplate(tokenizer, template, config.apply_chat_template_kwargs, config.end_of_turn, stops)
        )

    @property
    def template_source(self) -> str:
        """The Jinja of the template, or of all where there are several."""
        return self._chats.template.source

    def texts(self, chat: Chat) -> list[ChatText]:
        """The chat's text, or with `turns=each` that of every turn to be learnt; `BadRecord` where one cannot be used.

        What is not printed, and `on_unprinted` lets through, is told of the first text that leaves it out.
        """
        texts = [
            self._special.chat_text(self._chats, part, self._config.special_tokens_in_text)
            for part in self._parts(chat)
        ]
        if any(text.rendered.unprinted for text in texts):
            self._tell_unprinted(texts)
        texts = [text for text in texts if text.rendered.targets]
        if not texts:
            raise BadRecord("no_target", "the chat template marks no assistant turn")
        return texts

    def _tell_unprinted(self, texts: list[ChatText]) -> None:
        """Leave each kind of words that is not printed with the first text alone; `BadRecord` where it is refused."""
        told: set[str] = set()
        for text in texts:
            left_out = text.rendered.unprinted
            text.rendered.unprinted = [kind for kind in left_out if kind not in told]
            told.update(left_out)
        left_out_told = f"the chat template leaves out: {', '.join(sorted(told))}"
        if self._config.on_unprinted != "warn":
            raise BadRecord("unprinted", left_out_told)
        if not any(text.rendered.targets for text in texts):
            raise BadRecord("no_target", f"there is nothing to learn: {left_out_told}")

    def _parts(self, chat: Chat) -> Iterator[Chat]:
        if self._config.turns == "each":
            for index, weight in chat.targets.items():
                yield Chat(chat.messages[: index + 1], {index: weight}, chat.tools)
            return
        if self._config.turns == "last" or self._config.last_turn_only:
            chat.keep_last_target()
            if not chat.targets:
                raise BadRecord("no_target", "the last assistant turn is no target")
        yield chat


def _template_text(chat_template: str | None) -> str | None:
    """The override: the file of that name, or the text itself."""
    if chat_template is None:
        return None
    is_text = is_template_text(chat_template)
    template = chat_template if is_text else read_template_file(chat_template, "chat_template")
    check_template(template, "one" if is_text else chat_template, "chat_template")
    return template


def _stop_tokens(tokenizer: Any, config: TokenizeConfig) -> list[str]:
    """The tokens that stop generation by the model's generation_config.json, where there is one."""
    from transformers.utils import cached_file

    path = cached_file(
        config.model.path or config.model.tokenizer,
        "generation_config.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            ids = json.load(file).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} must be a generation config in JSON: {first_line(error)}") from error
    ids = ids if isinstance(ids, list) else [ids]
    return [token for token in tokenizer.convert_ids_to_tokens([i for i in ids if isinstance(i, int)]) if token]
