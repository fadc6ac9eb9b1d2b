"""The objective of distillation is the published one, whatever the outputs mean, and needs a teacher."""

from __future__ import annotations

import pytest
import torch
from ensemblekit_methods.distillation import Distillation, teacher_outputs
from torch.nn import functional

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.core.losses import MSE, NLL, CrossEntropy, Exponential

TEACHERS, MEMBERS, BATCH, CLASSES = 4, 3, 7, 5


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def member_loss(method, outputs, target, teacher, loss):
    """What the hook returns for a teacher (T, B, C) that one auxiliary network computes."""
    auxiliary = {"teacher": teacher.movedim(0, 1).flatten(1).unsqueeze(0)}
    return method.member_loss(outputs, target, loss, len(outputs), torch.arange(len(outputs)), auxiliary)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_those_of_kl_div(temperature, share):
    outputs = random(MEMBERS, BATCH, CLASSES).requires_grad_()
    teacher, target = 3 * random(TEACHERS, BATCH, CLASSES, seed=1), torch.arange(BATCH) % CLASSES
    method = Distillation(temperature=temperature, share=share)
    value = member_loss(method, outputs, target, teacher, CrossEntropy())

    mixture = sum(functional.softmax(one / temperature, dim=1) for one in teacher) / TEACHERS
    expected = []
    for own in outputs:
        logs = functional.log_softmax(own / temperature, dim=1)
        divergence = functional.kl_div(logs, mixture, reduction="none").sum(dim=1)
        labels = functional.cross_entropy(own, target, reduction="none")
        expected.append(((1 - share) * labels + share * temperature**2 * divergence) / MEMBERS)
    torch.testing.assert_close(value, torch.stack(expected), rtol=1e-12, atol=1e-12)
    weights = random(MEMBERS, BATCH, seed=2)
    (gradient,) = torch.autograd.grad((value * weights).sum(), outputs)
    (other,) = torch.autograd.grad((torch.stack(expected) * weights).sum(), outputs)
    torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda own: member_loss(method, own, target, teacher, CrossEntropy()), outputs)


def test_with_a_temperature_of_1_probabilities_are_learned_like_logits():
    logits, target = random(MEMBERS, BATCH, CLASSES), torch.zeros(BATCH, dtype=torch.int64)
    teacher, method = random(TEACHERS, BATCH, CLASSES, seed=1), Distillation(temperature=1, share=0.5)
    expected = member_loss(method, logits, target, teacher, CrossEntropy())
    actual = member_loss(method, logits.softmax(dim=-1), target, teacher.softmax(dim=-1), NLL())
    torch.testing.assert_close(actual, expected)


def test_a_teacher_that_excludes_a_class_gives_a_finite_loss():
    teacher = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64)
    outputs = torch.tensor([[[0.75, 0.25]]], dtype=torch.float64)
    value = member_loss(Distillation(temperature=1, share=1), outputs, torch.tensor([0]), teacher, NLL())
    torch.testing.assert_close(value, -torch.tensor([[0.75]], dtype=torch.float64).log())


def test_a_margin_is_the_probability_of_one_of_two_classes():
    outputs, teacher, target = random(1, BATCH, 1), random(TEACHERS, BATCH, 1, seed=1), torch.ones(BATCH)
    value = member_loss(Distillation(temperature=1, share=1), outputs, target, teacher, Exponential())
    mixture, own = torch.sigmoid(2 * teacher).mean(dim=0), torch.sigmoid(2 * outputs[0])
    expected = mixture * (mixture / own).log() + (1 - mixture) * ((1 - mixture) / (1 - own)).log()
    torch.testing.assert_close(value, expected.T)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_values_are_drawn_to_the_mean_of_the_teacher(share):
    outputs, target, teacher = random(MEMBERS, BATCH, 2), random(BATCH, 2, seed=1), random(TEACHERS, BATCH, 2, seed=2)
    value = member_loss(Distillation(share=share), outputs, target, teacher, MSE())
    labels, mean = (outputs - target).pow(2).sum(-1) / 2, (outputs - teacher.mean(0)).pow(2).sum(-1) / 2
    torch.testing.assert_close(value, ((1 - share) * labels + share * mean) / MEMBERS)


@pytest.mark.parametrize(("loss", "size"), [(CrossEntropy(), CLASSES), (MSE(), 2)])
def test_each_member_can_learn_from_its_own_member_of_the_teacher(loss, size):
    outputs, teacher = random(MEMBERS, BATCH, size), random(MEMBERS, BATCH, size, seed=1)
    target = torch.zeros(BATCH, dtype=torch.int64) if size == CLASSES else random(BATCH, size, seed=2)
    value = member_loss(Distillation(learn="members"), outputs, target, teacher, loss)
    alone = [
        member_loss(Distillation(), outputs[index : index + 1], target, teacher[index : index + 1], loss)
        for index in range(MEMBERS)
    ]
    torch.testing.assert_close(value, torch.cat(alone) / MEMBERS)


def test_no_gradient_flows_into_the_teacher():
    outputs = random(1, BATCH, CLASSES).requires_grad_()
    teacher = random(TEACHERS, BATCH, CLASSES, seed=1).requires_grad_()
    target = torch.zeros(BATCH, dtype=torch.int64)
    value = member_loss(Distillation(), outputs, target, teacher, CrossEntropy()).sum()
    own, others = torch.autograd.grad(value, [outputs, teacher], allow_unused=True)
    assert own is not None
    assert others is None


def test_teachers_may_be_networks_of_several_members():
    teacher = random(6, BATCH, CLASSES)
    pairs = teacher.unflatten(0, (3, 2)).movedim(1, 2).flatten(2)  # (3, B, 2 · C)
    torch.testing.assert_close(teacher_outputs(pairs, CLASSES), teacher)
    torch.testing.assert_close(teacher_outputs(teacher, CLASSES), teacher)


SPEC = {"data": {"name": "digits"}, "model": "mlp", "method": {"name": "distillation"}, "ensemble": {"members": 1}}
GROUP = {"role": "auxiliary", "name": "teacher", "outputs": 30, "model": {"name": "mlp"}}


def test_a_spec_without_a_teacher_is_refused():
    with pytest.raises(SpecError, match='needs an auxiliary group "teacher"'):
        ek.load_spec(SPEC)


@pytest.mark.parametrize(
    ("group", "method", "message"),
    [
        ({"outputs": 25}, {}, "have 25 outputs, but a prediction has 10"),
        ({}, {"learn": "members"}, "one of the teacher's 3, but there are 1"),
    ],
)
def test_a_teacher_of_another_size_is_refused(group, method, message):
    groups = [{"members": 1}, {**GROUP, **group}]
    with pytest.raises(SpecError, match=message):
        ek.load_spec({**SPEC, "ensemble": {"groups": groups}, "method": {"name": "distillation", **method}})


def test_a_loss_of_distributions_of_values_is_refused():
    class Gaussian(MSE):
        def slices(self, num_outputs):
            return {"mean": 1, "variance": num_outputs - 1}

    groups = [{"members": 1}, {**GROUP, "outputs": 2}]
    tables = {**SPEC, "data": "diabetes", "ensemble": {"groups": groups}, "training": {"loss": "gaussian"}}
    with pytest.raises(SpecError, match="parameters of a distribution"):
        ek.load_spec(tables, plugins=[Gaussian])


def test_the_objective_of_outputs_alone_says_that_a_teacher_is_missing():
    with pytest.raises(ek.UsageError, match='needs the outputs of the auxiliary group "teacher"'):
        ek.objective("distillation", random(2, BATCH, CLASSES), torch.zeros(BATCH, dtype=torch.int64))
