"""For every test: one torch thread, Hypothesis without deadlines and with fixed seeds in CI."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)  # small threaded ops collapse beside another busy process

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Triton decides when it is imported whether it interprets: those tests are a process of their own.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]
