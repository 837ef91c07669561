"""Secrets are left out of what is printed or written: keys, tokens and passwords in options, URLs and messages.

    {"wandb_api_key": "1f…"}                       ***       a name that says so
    https://me:word@host/a.jsonl                   https://***@host/a.jsonl
    https://host/a?X-Amz-Signature=9f…&v=2         https://host/a?X-Amz-Signature=***&v=2
    hf_…, sk-…, ghp_…, AKIA…                       ***       what looks like a token of a known service
    the value of HF_TOKEN, WANDB_API_KEY, …        ***       wherever it stands

A secret of no known form, under a name that does not show it, is not recognized.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SAYS_SO = re.compile(r"api_?key|access_?key|private_?key|secret|passw(or)?d|credential|authorization|signature", re.I)
_TOKEN = re.compile(r"(^|[\W_])(?P<of>[a-z0-9]*)[_-]?token$", re.I)
_SPECIAL = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "prompt", "stop")
_USER_INFO = re.compile(r"(?<=://)[^/\s@'\"]+@")
_ASSIGNED = re.compile(r"(?P<name>[\w.-]+)(?P<sign>\s*[=:](?!//)\s*)(?P<value>[^\s&,;'\"{}\[\]()]+)")
_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_SHORTEST = 8  # of a value of the environment that is taken for a secret


def is_secret_name(name: str) -> bool:
    """Whether an option, a variable or a field of a URL's query is named as a secret is."""
    last = name.rpartition(".")[2]
    if _SAYS_SO.search(last):
        return True
    token = _TOKEN.search(last)
    return token is not None and token["of"].lower() not in _SPECIAL


def redacted(value: Any) -> Any:
    """Plain values, nested ones too, without the secrets in them; what is no text stays as it is."""
    if isinstance(value, Mapping):
        return {name: _masked(str(name), each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([redacted(each) for each in value])
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """A text without the secrets in it."""
    for secret in _of_the_environment():
        text = text.replace(secret, MASK)
    text = _USER_INFO.sub(f"{MASK}@", _FORMS.sub(MASK, text))
    return _ASSIGNED.sub(lambda found: _assigned(found), text)


def _masked(name: str, value: Any) -> Any:
    is_text = isinstance(value, str) and value != ""
    return MASK if is_text and is_secret_name(name) else redacted(value)


def _assigned(found: "re.Match[str]") -> str:
    if found["value"] in ("null", "None", "true", "false") or not is_secret_name(found["name"]):
        return found[0]
    return f"{found['name']}{found['sign']}{MASK}"


def _of_the_environment() -> list[str]:
    """Values of variables that are named as secrets are, the longest first; a path to a file of them is none."""
    values = {value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= _SHORTEST}
    return sorted((value for value in values if not os.path.exists(value)), key=len, reverse=True)
