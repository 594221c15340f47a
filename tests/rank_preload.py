"""What the fork server of :mod:`tests.ranks` loads once for all processes. Refuses the network as ``conftest`` does."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import lightning_modules.lean_grpo  # noqa: F401
from tests import conftest, tiny_models  # noqa: F401
