"""Mask secrets in output by name, URL, token format and environment.

    {"wandb_api_key": "1f…"}, hf_token=1f…, https://me:word@host/, https://host/a?X-Amz-Signature=9f…, hf_…, sk-…

A secret without a known format, under a name that does not reveal it, is not recognized.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_NAME = re.compile(
    "api_?key|access_?key|private_?key|secret|passw(or)?d|credential|authorization|signature|"
    r"(?<!bos.)(?<!eos.)(?<!pad.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)(?<!image.)(?<!video.)(?<!audio.)(?<!prompt.)"
    "(?<!stop.)token$",
    re.IGNORECASE,
)
_FORM = re.compile(
    r"(?<=://)[^/\s@'\"]+(?=@)|\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|eyJ)[A-Za-z0-9_.-]{16,}"
)
_ASSIGNED = re.compile(r"([\w.-]+)(\s*[=:](?!//)\s*)(?!(?:null|None|true|false)\b)([^\s&,;'\"{}\[\]()]+)")


def redacted(value: Any) -> Any:
    """Return plain values, also nested ones, with the secrets in them masked."""
    if isinstance(value, Mapping):
        return {
            key: MASK if each and isinstance(each, str) and _says_so(key) else redacted(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)([redacted(each) for each in value])
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return a text with the secrets in it masked."""
    secrets = {value for name, value in os.environ.items() if _says_so(name) and len(value) >= 8}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text if os.path.exists(secret) else text.replace(secret, MASK)  # the path of a secret is not secret
    text = _FORM.sub(MASK, text)
    return _ASSIGNED.sub(lambda match: f"{match[1]}{match[2]}{MASK}" if _says_so(match[1]) else match[0], text)


def _says_so(name: Any) -> bool:
    return _NAME.search(str(name).rpartition(".")[2]) is not None
