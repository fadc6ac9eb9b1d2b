"""The one training loop, its statistics, its events and how it is interrupted.

Uses the layers up to `engines`. Start with `trainer.py`.
"""
