"""The model that is there without a download: small, trained to answer about long documents."""

from pathlib import Path

BUILTIN_MODEL_DIR = Path(__file__).resolve().parent / "builtin_model"
