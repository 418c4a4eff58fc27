"""Runs when Python starts: in each rank of ``paceline run --patch``, and in each Python that a rank starts.

Python finds it because its folder is the first of PYTHONPATH. There it hides the sitecustomize that Python
would run otherwise, so it runs that one too. Its syntax is old, because the Python may be an old one.
"""

import os
import sys

_folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would take longer to import than all else here
sys.path[:] = [path for path in sys.path if path != _folder]
if sys.version_info >= (3, 11):  # noqa: UP036 - see above
    import runpy

    runpy.run_path(os.path.join(os.path.dirname(_folder), "patch_torch.py"))["install"]()  # noqa: PTH118, PTH120

_ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - for what it does
except ImportError as _error:
    if _error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _ours
