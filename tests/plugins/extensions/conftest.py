"""Where trackers write in tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def tracker_settings(tmp_path, monkeypatch):
    """Everything that trackers write is in a temporary directory, and they print nothing."""
    for name in ("DIR", "CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path
