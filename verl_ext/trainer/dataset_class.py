"""The dataset class of a run: ours, or the one that `data.custom_cls` names."""

from omegaconf import DictConfig

from verl_ext.data import SFTDataSet


def dataset_class(config: DictConfig) -> type[SFTDataSet]:
    """`SFTDataSet`, or a subclass of it from `data.custom_cls.path` and `data.custom_cls.name`.

    Raises:
        ValueError: the class is no `SFTDataSet`: the trainer asks a dataset for its plan, spans and categories.
    """
    custom = config.data.custom_cls
    if not custom.get("path"):
        return SFTDataSet
    from verl.utils.import_utils import load_extern_object

    named = load_extern_object(custom.path, custom.name)
    if not (isinstance(named, type) and issubclass(named, SFTDataSet)):
        raise ValueError(
            f"data.custom_cls.name must name a subclass of verl_ext.data.SFTDataSet; got {custom.name} of {custom.path}"
        )
    return named
