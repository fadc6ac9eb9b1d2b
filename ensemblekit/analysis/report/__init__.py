"""The report of a run or a sweep: one HTML page with figures, their data and the samples worth a look.

Use: `ensemblekit.report(path)`. Start with `run_report`: it lists the sections, each computed by a file of its topic.
"""
