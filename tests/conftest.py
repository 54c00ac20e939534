"""Shared helpers: the folder `support` is importable in tests as `specdec_tests`.

Test folders stay off `sys.path`, where `tests/kernels` would shadow the PyPI package of that name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.register_assert_rewrite("specdec_tests")
package = ModuleType("specdec_tests", "Helpers of the tests.")
package.__path__ = [str(Path(__file__).parent / "support")]
sys.modules.setdefault(package.__name__, package)

# Models in tests are tiny: a second thread would only wait for the first.
torch.set_num_threads(1)
