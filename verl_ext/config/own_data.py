"""The data groups that are not packs of a tokenised dataset: their classes, and the options that are theirs."""

from omegaconf import DictConfig, OmegaConf

from verl_ext.values import show

PACKS = "SFTDataSet"


BABILONG = "BABILongDataset"


PRETRAIN = "PreTrainDataset"


MULTIDOC = "MultiDocDataset"


_SHARED = ("train_ratio", "cache_dir")


_TEXT = ("text_key", "special_tokens_in_text", "on_bad_record")


_STREAM = (
    *("blend", "blend_rule", "seq_len", "sampling", "num_samples", "attend_across_documents"),
    *("val_sampling", "val_seed", "add_eos", "max_corpus_tokens"),
)


# Class: (its data group, the keys below data that it reads beside those of packs).
OWN_CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    BABILONG: ("babilong", (*_SHARED, "answer_reserve_tokens", "truncate", "append_eos")),
    PRETRAIN: ("pretrain", (*_SHARED, *_TEXT, "rows")),
    MULTIDOC: ("multidoc", (*_SHARED, *_TEXT, *_STREAM)),
}


OWN_KEYS = tuple(dict.fromkeys(f"data.{name}" for _, names in OWN_CLASSES.values() for name in names))


# Values of data.custom_cls.name that mean a class of this package, or none: packs.
NOT_USERS_CLASS = (None, "", "null", PACKS, *OWN_CLASSES)


TOKENISED = "the folder that `verl-ext tokenize` wrote"


_TRAIN_DIR_IS = {
    BABILONG: "BABILong's JSON files",
    PRETRAIN: "files of text records",
    MULTIDOC: "texts or an index, or data.blend in its place",
}


def train_dir_is(config: DictConfig) -> str | None:
    """What data.train_dir must name; None where a blend stands in for it."""
    if config.data.get("blend") is not None:
        return None
    return _TRAIN_DIR_IS.get(config.data.custom_cls.name, TOKENISED)


def splits_validation(config: DictConfig) -> bool:
    """Whether the validation set is a part of the training data."""
    if config.data.custom_cls.name not in OWN_CLASSES or config.data.val_dir:
        return False
    ratio = config.data.get("train_ratio", 1)
    return isinstance(ratio, float) and ratio < 1


def own_option_problems(config: DictConfig) -> list[str]:
    """Options of a data group that the chosen one does not read."""
    chosen = config.data.custom_cls.name
    if chosen not in NOT_USERS_CLASS:
        return []  # a class of the user's may read any
    problems = []
    for key in OWN_KEYS:
        name = key.removeprefix("data.")
        groups = [f"data={group}" for cls, (group, names) in OWN_CLASSES.items() if name in names and cls != chosen]
        reads = chosen in OWN_CLASSES and name in OWN_CLASSES[chosen][1]
        value = OmegaConf.select(config, key)
        if not reads and value is not None:
            problems.append(f"{key} is an option of {', '.join(groups)}; got {show(value)} without it")
    return problems
