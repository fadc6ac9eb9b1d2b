"""Independent training: the behaviour of the core if no hook is implemented."""

from ensemblekit import Method


class Independent(Method):
    """Trains every member independently on all data: the plain deep ensemble."""

    paper = "Lakshminarayanan et al. 2017, Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles"
    formula = "(1/M) sum_i l(h_i, y)"
