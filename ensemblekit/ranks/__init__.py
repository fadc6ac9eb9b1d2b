"""Several processes that train one ensemble together, each with some of its members.

Uses `core` only. Start with `group.py`: what processes exchange. `session.py` joins them and reports a failure of one
to all, `watch.py` notices one that is gone or hangs, and `assignment.py` says which process trains which network.
With a journal (`journal.py`), a lost process is replaced (`supervisor.py`) and catches up (`healing.py`).
"""
