"""Several processes that train one ensemble together, each with some of its members.

Uses `core` only. Start with `group.py`: what processes exchange. `launch.py` reads how they were started, `joining.py`
lets them find each other, `session.py` reports a failure of one to all, `watch.py` notices one that is gone or hangs
(`process.py` says where each runs), and `assignment.py` says which process trains which network.
With a journal (`journal.py`), a lost process is replaced (`supervisor.py`) and catches up (`healing.py`).
"""
