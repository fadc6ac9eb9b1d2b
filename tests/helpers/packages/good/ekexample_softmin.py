"""A third party's method, as short as they get."""

from pydantic import Field

from ensemblekit import Method, hookimpl


class SoftMin(Method):
    """Members of little loss on a sample learn most from it."""

    paper = "An example"
    formula = "sum_i softmax(-l(h_i, y) / temperature)_i l(h_i, y)"
    temperature: float = Field(1.0, gt=0, description="large: everyone learns; small: only the best")

    @hookimpl
    def member_loss(self, outputs, target, loss):
        losses = loss(outputs, target)
        return (-losses.detach() / self.temperature).softmax(dim=0) * losses
