"""The dataset class of a run: ours, or the one that `data.custom_cls` names."""

from omegaconf import DictConfig

from verl_ext.data import PackDataset, SFTDataSet


def dataset_class(config: DictConfig) -> type[PackDataset]:
    """`SFTDataSet`, or the `PackDataset` that `data.custom_cls.path` and `data.custom_cls.name` are.

    Raises:
        ValueError: the class is no `PackDataset`: the trainer asks a dataset for its packs and categories.
    """
    custom = config.data.custom_cls
    if not custom.get("path"):
        return SFTDataSet
    from verl.utils.import_utils import load_extern_object

    named = load_extern_object(custom.path, custom.name)
    if not (isinstance(named, type) and issubclass(named, PackDataset)):
        raise ValueError(
            "data.custom_cls.name must name a subclass of verl_ext.data.PackDataset; got "
            f"{custom.name} of {custom.path}"
        )
    return named
