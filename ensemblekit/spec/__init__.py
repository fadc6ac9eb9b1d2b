"""A TOML file becomes a `Spec`: validated plugins and settings, every problem reported at once.

Uses `core` only. Start with `sections.py`, which describes every section once: reader, writer and schema follow it.
"""
