"""`python -m ensemblekit` is the command line."""

from ensemblekit.cli import main

main(prog_name="ensemblekit")
