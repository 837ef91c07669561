"""What the server that ranks fork from does once, and every rank would do again: a third of a short run's time."""

from transformers import AutoModelForImageTextToText

import verl_ext.engines.chunked
import verl_ext.engines.packed
import verl_ext.trainer.trainer  # noqa: F401
from verl_ext.config.schema import known_keys

known_keys()
list(AutoModelForImageTextToText._model_mapping.keys())  # verl asks each model whether it is one of these
