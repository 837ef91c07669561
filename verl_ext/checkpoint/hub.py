"""The upload of an export to the Hugging Face Hub, by huggingface_hub."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from verl_ext.checkpoint.card import CARD
from verl_ext.checkpoint.layout import EXPORT_MARKER
from verl_ext.options import DataError, first_line, must

# Weights of an earlier push, which transformers could load in place of the new ones.
_WEIGHTS = ["model*.safetensors*", "adapter_model*"]


def push_problems(repo: str) -> Iterator[str]:
    """Yield a line for a wrong name or a missing token, without a server."""
    try:
        validate_repo_id(repo)
        is_name = repo.count("/") == 1
    except HFValidationError:
        is_name = False
    if not is_name:
        yield must("push_to", "be owner/name of a repository", repo)
    elif get_token() is None:
        yield f"push_to={repo} needs a token of the Hub, in HF_TOKEN or by `hf auth login`; got none"


def push(folder: Path, repo: str, private: bool) -> str:
    """Push an export to a repository, which may exist; return its address.

    Raises:
        DataError: If the folder lacks a file, or the Hub refuses; the folder stays as it is.
    """
    if missing := _missing_file(folder):
        raise DataError(f"push_to={repo} needs a whole export; {folder} has no {missing}")
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:  # an existing one keeps its visibility
            raise DataError(must("private", f"be false for {repo}, which is public", True))
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Export of verl-ext", delete_patterns=_WEIGHTS
        )
    except (Exception, KeyboardInterrupt) as error:  # of huggingface_hub, its transports and the server
        why, again = first_line(error), f"hf upload {repo} {folder}{' --private' if private else ''}"
        raise DataError(f"push_to={repo} failed ({why}); the export is whole and kept: {again}") from error
    return str(url)


def _missing_file(folder: Path) -> str | None:
    """Return the name of a file that the folder lacks."""
    try:
        is_adapter = json.loads((folder / EXPORT_MARKER).read_text(encoding="utf-8"))["form"] == "adapter"
    except (OSError, ValueError, KeyError):
        return EXPORT_MARKER
    needed = ["adapter_config.json", "adapter_model.safetensors"] if is_adapter else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        needed += sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif not is_adapter:
        needed.append("model.safetensors")
    return next((name for name in (CARD, *needed) if not (folder / name).is_file()), None)
