"""Work that the ranks' fork server does once; done by every rank, it would take a third of a short run's time."""

from transformers import AutoModelForImageTextToText

import verl_ext.engines.packed
import verl_ext.titans.engine
import verl_ext.trainer.trainer  # noqa: F401
from verl_ext.config.schema import known_keys

known_keys()
list(AutoModelForImageTextToText._model_mapping.keys())  # verl checks each model against these
