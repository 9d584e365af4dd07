import os

import torch
from hypothesis import settings

torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
settings.register_profile("subquad", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("subquad")
