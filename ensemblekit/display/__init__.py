"""What a person sees in a terminal: tables, the progress of a run, its closing summary.

Uses the layers up to `inference`; `api.py` and `cli` use it. Start with `progress.py`.
"""
