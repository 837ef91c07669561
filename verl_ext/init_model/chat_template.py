"""ChatML, and chat templates read from files."""

from pathlib import Path

from verl_ext.commands.errors import DataError, UsageError

CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_chat_template(named: str | None) -> str | None:
    """The template of `tokenizer.chat_template`: ChatML, a file's text, or none.

    Raises `DataError` for a file that is not UTF-8, `UsageError` for one that is no Jinja.
    """
    if named is None or named == CHATML:
        return CHATML_TEMPLATE if named else None
    try:
        template = Path(named).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"whose byte {error.start + 1} is not"
        raise DataError(f"tokenizer.chat_template must be UTF-8; got {named}, {where}") from error
    _check_chat_template(template, named)
    return template


def _check_chat_template(template: str, named: str) -> None:
    """Refuse a template that is no Jinja. What one says to a chat is its own business."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        line = f"line {error.lineno}: {error.message}"
        raise UsageError(f"tokenizer.chat_template must be a Jinja template; got {named}, {line}") from error
    except TemplateError:
        return
