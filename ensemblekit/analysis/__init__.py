"""What runs show together: listings, from run directories and their kept outputs.

Uses the layers up to `inference`. Start with `run_list.py`, which finds and describes the runs below a directory.
"""
