"""transformers' tokenizers, imported without torch, which costs three seconds and 300 MB and which they do not use.

transformers takes torch for not installed then, as long as the process lives: see `leave_out_torch`.
"""

import sys
from typing import Any, cast

# transformers looks for torch once, when it is imported first.
hidden = not {"torch", "transformers"} & set(sys.modules)
if hidden:
    cast(Any, sys.modules)["torch"] = None  # marks a module as not importable
try:
    import transformers.models.auto.tokenization_auto  # noqa: F401
finally:
    if hidden:
        del sys.modules["torch"]
