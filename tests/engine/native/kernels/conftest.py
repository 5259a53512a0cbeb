"""Where there is no CUDA device the kernels run in Triton's interpreter, as `tests/conftest.py` has chosen."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch


def mend_loops() -> None:
    """Loops to a bound that was loaded: the interpreter keeps it in an array of one, which numpy takes for no int."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if find_spec("triton") is None:  # there is none for some systems, and a test cannot be skipped from here
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    mend_loops()
