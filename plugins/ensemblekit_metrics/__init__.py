"""The built-in metrics that a spec has to ask for, one file each."""
