"""Measures the engines against loops that are written by hand: the work of `ensemblekit bench`."""
