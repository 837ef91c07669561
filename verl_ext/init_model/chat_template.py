"""ChatML, and chat templates read from files."""

from verl_ext.commands.tokenizer import check_template, read_template_file

KEY = "tokenizer.chat_template"
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

    Raises `UsageError` for a file that cannot be read as text, or is no Jinja.
    """
    if named is None or named == CHATML:
        return CHATML_TEMPLATE if named else None
    template = read_template_file(named, KEY)
    check_template(template, named, KEY)
    return template
