"""Silence for transformers, which reports on stderr what our own progress already says."""

from __future__ import annotations

import warnings


def quiet() -> None:
    """No log messages, progress bars or warnings about the future from transformers, accelerate and torch."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|accelerate|torch")
