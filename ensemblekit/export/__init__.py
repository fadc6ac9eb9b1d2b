"""A trained ensemble for other programs: a service over HTTP.

Uses `inference` and everything below it. Start with `service.py`, which serves a run.
"""
