"""transformers' tokenizers, imported without torch, which would cost three seconds and 300 MB and is not used.

For the rest of the process transformers takes torch for not installed: see `leave_out_torch`.
"""

import os
import sys
from typing import Any, cast

# transformers looks for torch once, when it is imported first.
hidden = not {"torch", "transformers"} & set(sys.modules)
told = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
if hidden:
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # "PyTorch was not found"
    cast(Any, sys.modules)["torch"] = None  # marks a module as not importable
try:
    import transformers.models.auto.tokenization_auto  # noqa: F401
finally:
    if hidden:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = told or ""
        del sys.modules["torch"]
