"""A student is an ordinary run that learns what its teacher predicts, stands alone, and is compared honestly."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.tiny_runs import train_until
from safetensors.torch import load_file
from torch import nn

import ensemblekit as ek
from ensemblekit import hookimpl
from ensemblekit.core.errors import DataError, PluginError, RunError, SpecError, UsageError
from ensemblekit.inference import students

SPEC = {
    "seed": 3,
    "data": {"name": "digits", "limit_train": 300, "limit_test": 100},
    "model": {"name": "mlp", "hidden": [16]},
    "ensemble": {"members": 3},
    "method": {"name": "gncl", "lambda": 0.3},
    "training": {"epochs": 4, "batch_size": 50, "optimizer": {"name": "adam", "lr": 0.01}},
    "engine": {"name": "sequential", "device": "cpu"},
}
FAST = {"engine.name": "sequential", "engine.device": "cpu"}
SMALL = {"name": "mlp", "hidden": [12]}


def distil(path, out, model=SMALL, overrides=None, **options):
    return ek.distil(path, model, out, overrides={**FAST, **(overrides or {})}, progress=False, **options)


@pytest.fixture(scope="module", autouse=True)
def short_timing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(students, "MIN_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return ek.train(SPEC, out=tmp_path_factory.mktemp("teacher") / "run", progress=False)


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    return distil(teacher.path, tmp_path_factory.mktemp("student") / "run", baseline=True, temperature=3.0)


def test_a_student_is_one_network_with_the_data_and_the_training_of_its_teacher(teacher, student):
    assert student.status == "finished"
    assert len(student.ensemble.members) == len(student.members) == 1
    spec = student.spec.to_dict()
    assert spec["model"] == {**spec["model"], **SMALL}
    assert spec["method"] == {"name": "distillation", "temperature": 3.0, "share": 0.9, "learn": "mean"}
    ours, theirs = student.spec, teacher.spec
    assert ours.training == theirs.training
    assert (ours.optimizer, ours.schedule, ours.loss, ours.seed) == (
        theirs.optimizer,
        theirs.schedule,
        theirs.loss,
        theirs.seed,
    )
    assert ours.data.limit_train == theirs.data.limit_train
    assert ours.data.split_seed == theirs.seed


def test_only_the_student_is_saved(student):
    tensors = load_file(student.path / "model.safetensors")
    assert {name.split(".")[1] for name in tensors} == {"0"}
    assert sum(value.numel() for name, value in tensors.items() if "num_batches" not in name) < 64 * 12 + 12 * 10 + 200
    assert json.loads((student.path / "model.json").read_text())["metadata"]["members"] == [0]


def test_a_student_predicts_when_its_teacher_is_gone(tmp_path):
    teacher = ek.train(SPEC, tmp_path / "teacher", progress=False)
    student = distil(teacher.path, tmp_path / "student", epochs=1)
    shutil.rmtree(teacher.path)
    inputs = torch.rand(4, 1, 8, 8)
    loaded = ek.load(student.path)
    torch.testing.assert_close(loaded(inputs), student.ensemble(inputs))
    assert ek.open_run(student.path).outputs("test").outputs.shape == (1, 100, 10)
    assert ek.evaluate_run(student.path)["test_accuracy"] == student.metrics["test_accuracy"]


def test_the_training_objective_is_that_of_the_formula(teacher, tmp_path):
    # one step with all samples: the objective is that of the student as it was built
    run = distil(
        teacher.path,
        tmp_path / "run",
        {"name": "mlp", "hidden": [], "batch_norm": False},
        {"training.batch_size": 10**4, "data.limit_test": 50},
        epochs=1,
        temperature=2.0,
        labels_share=0.25,
    )
    data = ek.load_data(run.spec.data, run.spec.seed)
    batch = next(data.train.batches(10**4))
    network = ek.build_model(run.spec.model, (1, 8, 8), 10, seed=run.spec.seed)
    logits = network(batch.inputs)
    mixture = (teacher.ensemble.member_outputs(batch.inputs) / 2).softmax(dim=-1).mean(dim=0)
    divergence = nn.functional.kl_div((logits / 2).log_softmax(dim=-1), mixture, reduction="batchmean")
    expected = 0.25 * nn.functional.cross_entropy(logits, batch.targets) + 0.75 * 4 * divergence
    assert run.history[0]["train_objective"] == pytest.approx(float(expected.detach()), rel=1e-4)


def test_the_comparison_has_the_figures_of_all_three_runs(teacher, student):
    figures, baseline = student.comparison, student.baseline
    assert student.teacher.path == teacher.path
    for name in ("test_accuracy", "test_nll", "test_ece"):
        assert figures[f"teacher_{name}"] == teacher.metrics[name]
        assert figures[f"baseline_{name}"] == baseline.metrics[name]
    own = 64 * 12 + 12 + 2 * 12 + 12 * 10 + 10
    assert figures["parameters"] == figures["baseline_parameters"] == own
    assert figures["teacher_parameters"] == sum(member["parameters"] for member in teacher.members)
    assert figures["time_ratio"] == figures["milliseconds_per_1000"] / figures["teacher_milliseconds_per_1000"]
    columns, *rows = student.rows()
    assert [row[0] for row in rows] == ["student", "teacher", "labels alone"]
    assert all(len(row) == len(columns) for row in rows)


def test_the_baseline_is_the_same_network_trained_on_labels_alone(student, tmp_path):
    assert student.baseline.path == student.path.with_name("run-baseline")
    ours, theirs = student.spec.to_dict(), student.baseline.spec.to_dict()
    assert {key for key in ours if ours[key] != theirs[key]} == {"method", "ensemble"}
    plain = ek.train(student.baseline.spec, tmp_path / "plain", progress=False)
    assert plain.metrics == student.baseline.metrics


def test_a_student_without_a_share_of_labels_comes_closer_to_its_teacher(teacher, tmp_path):
    options = {"baseline": True, "labels_share": 0.0, "epochs": 12, "temperature": 1.0}
    student = distil(teacher.path, tmp_path / "run", {"name": "mlp", "hidden": [32]}, **options)
    expected = teacher.ensemble.loss.probabilities(teacher.outputs("test").outputs).mean(dim=0)

    def divergence(run):
        own = run.ensemble.loss.log_probabilities(run.outputs("test").outputs[0])
        return float(nn.functional.kl_div(own, expected, reduction="batchmean"))

    assert divergence(student) < 0.7 * divergence(student.baseline)


def test_a_student_can_learn_the_disagreement_too(teacher, tmp_path):
    model = {"name": "mlp", "hidden": [64]}
    student = distil(
        teacher.path, tmp_path / "run", model, uncertainty=True, baseline=True, epochs=20, labels_share=0.0
    )
    assert student.spec.model.name == "multi_head"
    assert len(student.ensemble.members) == 1
    assert student.outputs("test").outputs.shape == teacher.outputs("test").outputs.shape
    figures = student.comparison
    assert figures["mutual_information_correlation"] > 0.5
    assert figures["mean_mutual_information"] == pytest.approx(figures["teacher_mean_mutual_information"], rel=0.5)

    def information(run):
        probabilities = run.ensemble.loss.probabilities(run.outputs("test").outputs.double())
        mean = probabilities.mean(dim=0)
        return torch.special.entr(mean).sum(-1) - torch.special.entr(probabilities).sum(-1).mean(0)

    def correlation(run):
        return float(torch.corrcoef(torch.stack([information(run), information(teacher)]))[0, 1])

    assert figures["mutual_information_correlation"] == pytest.approx(correlation(student), rel=1e-6)
    assert correlation(student) > correlation(student.baseline) + 0.1


def test_values_are_distilled_with_their_spread(tmp_path):
    spec = {**SPEC, "data": "diabetes", "method": "independent"}
    teacher = ek.train(spec, tmp_path / "teacher", progress=False)
    student = distil(teacher.path, tmp_path / "student", uncertainty=True)
    assert student.comparison["teacher_test_rmse"] == teacher.metrics["test_rmse"]
    assert -1 <= student.comparison["standard_deviation_correlation"] <= 1
    assert "rmse" in " ".join(student.rows()[0])


def test_a_teacher_may_be_a_family(tmp_path):
    family = {"name": "multi_head", "model": {"name": "mlp", "hidden": [8]}, "features": 8}
    teacher = ek.train({**SPEC, "model": family}, tmp_path / "teacher", progress=False)
    student = distil(teacher.path, tmp_path / "student", epochs=1)
    assert student.spec.auxiliary_groups[0].outputs == 30
    network = ek.build_model(student.spec.auxiliary_groups[0].model, (1, 8, 8), 30)
    inputs = torch.rand(5, 1, 8, 8)
    expected = teacher.ensemble.member_outputs(inputs).movedim(0, 1).flatten(1)
    torch.testing.assert_close(network(inputs), expected)


def test_a_network_class_and_python_data_are_distilled(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 4, generator=generator)
    data = (inputs, (inputs[:, 0] > 0).long())
    tables = {key: value for key, value in SPEC.items() if key not in ("data",)}
    teacher = ek.train(tables, tmp_path / "teacher", progress=False, data=data)
    student = distil(teacher.path, tmp_path / "student", lambda: nn.Linear(4, 2), data=data)
    assert isinstance(student.ensemble.members[0], nn.Linear)
    changed = (inputs, (inputs[:, 1] > 0).long())
    with pytest.raises(DataError, match="not what the run was started with"):
        distil(teacher.path, tmp_path / "other", data=changed)
    assert not (tmp_path / "other").exists()


def test_another_seed_keeps_the_samples_that_are_held_out(teacher, tmp_path):
    student = distil(teacher.path, tmp_path / "run", overrides={"seed": 11}, epochs=1)
    ours, theirs = student.outputs("test"), teacher.outputs("test")
    assert torch.equal(ours.index, theirs.index)
    assert torch.equal(ours.targets, theirs.targets)


def test_a_teacher_that_has_not_finished_is_refused(tmp_path):
    train_until(tmp_path / "stopped", 2)
    with pytest.raises(RunError, match="only a finished ensemble can be distilled") as raised:
        distil(tmp_path / "stopped", tmp_path / "student")
    assert raised.value.exit_code == 5
    assert "ensemblekit resume" in raised.value.fix


class Doubling(ek.Method):
    """Sums instead of averages."""

    formula = "l"

    @hookimpl
    def combine(self, outputs):
        return outputs.sum(dim=0)


def test_a_plugin_that_is_not_installed_is_named(tmp_path):
    spec = {**SPEC, "method": "doubling", "training": {"epochs": 1}}
    run = ek.train(spec, tmp_path / "teacher", progress=False, plugins=[Doubling])
    with pytest.raises(PluginError, match="doubling") as raised:
        distil(run.path, tmp_path / "student")
    assert raised.value.exit_code == 4
    with pytest.raises(UsageError, match='"doubling" combines them differently'):
        distil(run.path, tmp_path / "student", plugins=[Doubling])
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "boosting"}, '"boosting" combines them differently'),
        (
            {"method": {"name": "dropout", "passes": 2}, "model": {"name": "mlp", "dropout": 0.5}},
            "those of stochastic passes",
        ),
    ],
)
def test_an_ensemble_that_is_not_the_mean_of_its_members_is_refused(changes, message, tmp_path):
    run = ek.train({**SPEC, "training": {"epochs": 1}, **changes}, tmp_path / "teacher", progress=False)
    with pytest.raises(UsageError, match=message):
        distil(run.path, tmp_path / "student")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mpl", "mpl"),
        ({"name": "sklearn", "estimator": "decision_tree"}, "cannot learn from a teacher"),
        ({"name": "mlp", "softmax": True}, "takes raw outputs"),
    ],
)
def test_a_model_that_cannot_learn_from_the_teacher_is_refused(teacher, model, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        distil(teacher.path, tmp_path / "student", model)
    assert not (tmp_path / "student").exists()


def test_a_model_that_cannot_take_the_inputs_is_refused(tmp_path):
    teacher = ek.train({**SPEC, "data": "diabetes", "training": {"epochs": 1}}, tmp_path / "t", progress=False)
    with pytest.raises((SpecError, PluginError), match="resnet"):
        distil(teacher.path, tmp_path / "student", "resnet")


def test_a_single_member_has_no_disagreement_to_learn(tmp_path):
    run = ek.train({**SPEC, "ensemble": {"members": 1}, "method": "independent"}, tmp_path / "t", progress=False)
    with pytest.raises(UsageError, match="single member"):
        distil(run.path, tmp_path / "student", uncertainty=True)
