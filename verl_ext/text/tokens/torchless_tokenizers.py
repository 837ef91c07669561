"""Import transformers' tokenizers without torch, which they do not need.

Importing torch takes 3 s and 300 MB. Afterwards, transformers treats it as not installed (see `leave_out_torch`).
"""

import os
import sys
from typing import Any, cast

# transformers looks for torch only once, when it is first imported.
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
