"""A comparison of the weights in `model.path` with its config's model."""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from logging import WARNING, LogRecord, getLogger
from pathlib import Path
from typing import Any

import torch
from transformers import utils
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from verl_ext.cache import fingerprint
from verl_ext.config.quantized import PlainHeaders, plain_headers, quantization_of
from verl_ext.engines.activations import ActivationOptions
from verl_ext.engines.lora import LoraOptions
from verl_ext.environment import UNKNOWN, files_digest, folder_digest
from verl_ext.layers.towers import FreezeOptions, outside_text
from verl_ext.options import first_line, must, option, refuse, shortened, spell
from verl_ext.text.read.json_records import parse_json
from verl_ext.text.tokens.new_tokens import NEW_SPECIAL_TOKENS, NEW_TOKENS

TENSORS = "; tensors "  # between the digests of the files and of the tensors in them
_SAMPLE = 256  # bytes that are read in two places of each tensor
_NAMED = 3  # the number of weights that a line names
_ENDINGS = (".safetensors", ".bin", ".pt")  # not a model card or a template, whose edit must not prevent a resume
_FILES = (utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME, utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME)
_OPTION = "model.allow_weight_mismatch"


@dataclass  # not frozen, because a subclass also derives from verl's dataclass
class ModelNode(ActivationOptions, FreezeOptions, LoraOptions):
    """The keys of the model node that verl lacks."""

    allow_weight_mismatch: list[str] = option(
        [],
        "globs of weights that may differ: those that model.path lacks begin random (lm_head.weight), those that only "
        "model.path has are left out (v_head.*)",
    )
    experts: str = option(
        "auto",
        "matrix products of a mixture of experts: grouped_mm: one for all experts; eager: a loop over them; auto: "
        "grouped_mm if transformers has it for the model",
        choices=("auto", "grouped_mm", "eager"),
    )
    quantization: str | None = option(
        None,
        "nf4: the frozen base under adapters lies in four bits a number, bitsandbytes' NF4 in blocks of 64, and is "
        "quantized while it is read; null: it does not",
        choices=("nf4",),
        resume="same",
    )
    quantization_nested: bool = option(
        False, "true: with the scales of bitsandbytes' double quantization, in the same memory", resume="same"
    )
    new_tokens: list[str] = option([], NEW_TOKENS, resume="same")
    new_special_tokens: list[str] = option([], NEW_SPECIAL_TOKENS, resume="same")


def weight_problems(folder: str, key: str = "model.path") -> list[str]:
    """Return one line if a folder's weights are missing, truncated or adapters."""
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files and not any(any(Path(folder).glob(kind)) for kind in ("pytorch_model*.bin", "model*.bin")):
        return [must(key, "hold weights (*.safetensors or pytorch_model*.bin)", folder)]
    if problem := _index_problem(Path(folder), key) or _adapter_problem(folder, key):
        return [problem]
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return [must(key, "hold weights that can be read", f"{file}: {error}")]
    return []


def _adapter_problem(path: str, key: str = "model.path") -> str | None:
    """Return a line if an adapter is there, which transformers would load."""
    if not utils.hub.has_file(path, ADAPTER_CONFIG_NAME):
        return None
    got = f"{path}, which has adapter_config.json (model.lora_adapter_path names an adapter)"
    return must(key, "hold a model without an adapter", got)


def _index_problem(folder: Path, key: str) -> str | None:
    """Return a line if an index is unreadable or names foreign files."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
            inside = all(Path(name).name == name for name in names)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return must(key, "hold an index of its weights that can be read", f"{index}: {first_line(error)}")
        if not inside:
            return f"{key} must hold the weights that its index names; {index} names files of other folders"
    return None


def check_weights(
    model_class: Any,
    hf_config: Any,
    path: str,
    allowed: Iterable[str] = (),
    override: Mapping[str, Any] | None = None,
    key: str = "model.path",
) -> list[str]:
    """Compare the weights' names and shapes with those of a config's model.

    transformers loads the headers as tensors without storage, so its renamings, conversions (experts become one
    tensor), ties and lists of ignored keys apply as in training. Weights that a class allows to be missing, such as the
    memory that a plain Qwen lacks, must be either all present or all missing. Quantized weights are compared as the
    plain ones that they become.

    Args:
        model_class: the class of the config, in transformers or in the folder.
        hf_config: the config.
        path: the folder or Hub name of the weights.
        allowed: `model.allow_weight_mismatch`.
        override: `model.override_config`, for error messages.
        key: the option that names the path.

    Returns a line for each kind of allowed difference, and one for weights that the class leaves out. Raises ValueError
    with a line for each other difference, and OSError if the Hub does not answer.
    """
    if problem := _adapter_problem(path, key):
        raise ValueError(problem)
    stored, hf_config = headers(path, key), copy.copy(hf_config)
    quantized = plain_headers(stored, quantization_of(hf_config)) or PlainHeaders(stored)
    if quantized.tensors is not stored:
        del hf_config.quantization_config
    model, found = _load_headers(model_class, hf_config, quantized.tensors)
    notices, problems, missing = [], [], set(found["missing_keys"])
    if left_out := found["left_out"]:
        notices.append(
            f"{key} also holds {counted_names(left_out)}: a {model_class.__name__} leaves them out, untrained"
        )
    if ties := ", ".join(f"{target} and {source}" for target, source in found["tied"].items()):
        notices.append(f"{key} holds {ties}, which its config ties: equal ones are trained as one, others separately")
    # A difference is an error unless the user lists it as intended.
    for has, names, then in (
        ("lacks", missing, "begin random"),
        ("also holds", found["unexpected_keys"], "are left out"),
        ("holds other shapes of", [*found["reshaped"], *quantized.reshaped], ""),
        ("holds a part of", found["torn"], ""),
        ("lacks the scales", quantized.lacking, ""),
    ):
        passed = {name for name in names if then and any(fnmatchcase(name, glob) for glob in allowed)}
        if passed:
            notices.append(f"{_OPTION}: {counted_names(passed)} of {key} {then}")
        if rest := set(names) - passed:
            # A part that is missing as a whole is one word, not a hundred names.
            for part in outside_text(model) if rest == missing else ():
                inside = {name for name in model.state_dict() if name.startswith(f"{part}.")}
                rest = rest - inside | {f"{part}.*"} if inside and inside <= rest else rest
            how = f" with model.override_config={spell(override)}" if override else ""
            hint = f"; {_OPTION}=[{min(rest)}] names those that may {then.replace('are', 'be')}" if then else ""
            problems.append(
                f"{key} must hold the weights of the {model_class.__name__} that its config means{how}; {path} "
                f"{has} {counted_names(rest)}{hint}"
            )
    refuse(problems)
    return notices


def _load_headers(model_class: Any, hf_config: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """Let transformers load headers on the meta device; return the model and the differences from it.

    They are its loading info, with names that are `reshaped`, `torn` (no model is made), `left_out` or `tied`.
    """
    # The class would hide weights that it may lack, of which some without others are a mistake.
    may_lack = re.compile("|".join(model_class._keys_to_ignore_on_load_missing or ["(?!)"]))
    # Its module tells transformers 5.24 that it is not custom code, whose names are not renamed.
    members = {"_keys_to_ignore_on_load_missing": None, "__module__": model_class.__module__}
    model_class, left_out = type(model_class.__name__, (model_class,), members), set[str]()
    ignore = model_class._adjust_missing_and_unexpected_keys

    def ignored(model: Any, found: Any) -> None:
        patterns = "|".join(model._keys_to_ignore_on_load_unexpected or ["(?!)"])
        left_out.update(name for name in found.unexpected_keys if re.search(patterns, name))
        ignore(model, found)

    model_class._adjust_missing_and_unexpected_keys = ignored
    with _without_bars(), _ties_of_headers() as compared, held_back("modeling_utils") as reports:
        try:
            model, found = model_class.from_pretrained(
                None,
                config=hf_config,
                state_dict=tensors,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except RuntimeError as error:  # e.g. an expert without up_proj; the report names the tensor
            torn = re.findall(r"^(\S+) +\|.*CONVERSION", "\n".join(reports), flags=re.MULTILINE)
            none = dict.fromkeys(("missing_keys", "unexpected_keys", "reshaped", "left_out"), ())
            return None, {**none, "tied": {}, "torn": torn or [first_line(error)]}
    # All of them missing is a plain model, whose memory begins new.
    new = set(filter(may_lack.search, found["missing_keys"]))
    if new == set(filter(may_lack.search, model.state_dict())):
        found["missing_keys"] -= new
    reshaped = [f"{name} {list(has)} for {list(needs)}" for name, has, needs in found["mismatched_keys"]]
    # On the meta device, transformers 5.24 leaves two tensors as they are instead of comparing them.
    tied = model.all_tied_weights_keys
    if not compared and all(model.get_parameter(one) is model.get_parameter(other) for one, other in tied.items()):
        tied = {}
    return model, {**found, "reshaped": reshaped, "torn": (), "left_out": left_out, "tied": tied}


@contextmanager
def _ties_of_headers() -> Iterator[list[torch.Size]]:
    """Let transformers compare tied weights by shape; yield the compared shapes."""
    equal, compared = torch.equal, []

    def of_shapes(x: torch.Tensor, y: torch.Tensor) -> bool:
        if not (x.is_meta and y.is_meta):
            return equal(x, y)
        compared.append(x.shape)
        return x.shape == y.shape

    torch.equal = of_shapes  # type: ignore[assignment]
    try:
        yield compared
    finally:
        torch.equal = equal


def digest_of_weights(path: str, key: str = "model.path") -> str:
    """Describe the files of a model's weights, and every tensor of its safetensors by samples.

    A Hub model is downloaded, and has the digest of a folder with the same files. The ends of files do not tell that
    an adapter was merged into some layers. A change between samples is not seen.
    """
    if os.path.exists(path):
        digest, files = folder_digest(path, _ENDINGS), sorted(Path(path).glob("*.safetensors"))
    else:
        files = sorted(Path(file) for file in weight_files(path, key))
        digest = files_digest(files, files[0].parent)
    samples = [sample for file in files if file.suffix == ".safetensors" for sample in _samples_of_tensors(file)]
    return f"{digest}{TENSORS}{fingerprint(*samples, digits=16)}" if samples else digest


def _samples_of_tensors(file: Path) -> Iterator[bytes]:
    """Yield the header of a safetensors file, and bytes from the beginning and the middle of each tensor."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        yield (header := opened.read(size))
        for entry in parse_json(header.decode()).values():
            first, last = entry.get("data_offsets", (0, 0))  # which the metadata lack
            for begin in first, (first + last) // 2:
                opened.seek(8 + size + begin)
                yield opened.read(min(_SAMPLE, last - begin))


def revision(path: str) -> str:
    """Return a Hub model's commit here, or a folder's content digest."""
    if os.path.exists(path):
        return folder_digest(path)
    file = utils.cached_file(path, utils.CONFIG_NAME)
    return Path(file).parent.name if file else UNKNOWN


def headers(path: str, key: str, names: Sequence[str] = _FILES) -> dict[str, Any]:
    """Read {name: tensor without storage} from the files of these names; download them if needed."""
    from transformers.modeling_utils import load_state_dict

    state: dict[str, Any] = {}
    for file in weight_files(path, key, names):
        try:
            state |= load_state_dict(file, map_location="meta")
        except Exception as error:  # a pickle may raise any error
            raise ValueError(must(key, "hold weights that can be read", f"{file}: {first_line(error)}")) from error
    return state


def weight_files(path: str, key: str = "model.path", names: Sequence[str] = _FILES) -> list[str]:
    """Return the weight files of the first name that is there, downloaded if needed."""
    for name in names:
        if utils.hub.has_file(path, name):
            file = utils.cached_file(path, name)
            assert file is not None, "has_file says that it is there"
            return utils.hub.get_checkpoint_shard_files(path, file)[0] if name.endswith(".index.json") else [file]
    raise ValueError(must(key, f"hold {' or '.join(names)}", path))


def counted_names(names: Iterable[str]) -> str:
    """Count names and show the first of them: `5: a, b, c and 2 more`."""
    names = sorted(names)
    return f"{len(names)}: {shortened(names, _NAMED)}"


@contextmanager
def held_back(name: str) -> Iterator[list[str]]:
    """Hold back the log messages of a transformers module; yield their list."""
    messages: list[str] = []
    logger = getLogger(f"transformers.{name}")

    def keep(record: LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger.addFilter(keep)
    level = logger.level
    logger.setLevel(WARNING)  # ranks silence transformers, but its reports are needed here
    try:
        yield messages
    finally:
        logger.setLevel(level)
        logger.removeFilter(keep)


@contextmanager
def _without_bars() -> Iterator[None]:
    has_bars = utils.logging.is_progress_bar_enabled()
    utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if has_bars:
            utils.logging.enable_progress_bar()
