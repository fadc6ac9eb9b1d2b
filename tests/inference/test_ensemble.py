"""A trained ensemble in the hands of its users: what it takes, what it returns, and that it survives being moved."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import warnings
from multiprocessing import get_context

import numpy as np
import pandas
import pytest
import torch
from helpers.fake_runs import CLASSIFIER, linear_ensemble
from torch import nn

import ensemblekit as ek
from ensemblekit.core import threads
from ensemblekit.core.errors import NumericError
from ensemblekit.data.transforms import ImageTransform

WEIGHTS = torch.tensor([[[1.0, 0], [0, 1], [0, 0]], [[1.0, 0], [0, -1], [0, 2]]])
INPUTS = torch.tensor([[1.5, 0.5], [0.0, 3.0]])


def classifier(classes: tuple[str, ...] | None = ("ant", "bee", "cow")) -> ek.Ensemble:
    """Two members, two features, three classes."""
    info = ek.DataInfo("classification", (2,), 3)
    return linear_ensemble(ek.load_spec(CLASSIFIER), WEIGHTS, info, classes).eval()


def image_classifier(normalise: bool = True) -> ek.Ensemble:
    """One member that sees the middle 2×2 pixels of 1×4×4 images."""
    spec = ek.load_spec({**CLASSIFIER, "data": {"name": "digits", "crop_size": 2}})
    transform = ImageTransform.of(spec.data, (1, 4, 4)).normalised_by(torch.tensor([0.25]), torch.tensor([0.5]))
    info = ek.DataInfo("classification", (1, 2, 2), 2)
    return linear_ensemble(spec, torch.rand(1, 2, 4), info, transform=transform if normalise else None).eval()


def test_predict_returns_names_or_indices_or_values():
    assert classifier().predict(INPUTS).tolist() == ["ant", "cow"]
    assert isinstance(classifier().predict(INPUTS), np.ndarray)
    assert classifier(classes=None).predict(INPUTS).tolist() == [0, 2]
    spec = ek.load_spec({"data": "diabetes", "model": "mlp", "training": {"loss": "mse"}})
    regressor = linear_ensemble(spec, WEIGHTS[:, :1], ek.DataInfo("regression", (2,), 1)).eval()
    assert regressor.predict(INPUTS).tolist() == [[1.5], [0.0]]


def test_a_regression_has_no_class_probabilities():
    spec = ek.load_spec({"data": "diabetes", "model": "mlp", "training": {"loss": "mse"}})
    regressor = linear_ensemble(spec, WEIGHTS[:, :1], ek.DataInfo("regression", (2,), 1)).eval()
    with pytest.raises(ek.UsageError, match="a regression has no class probabilities") as caught:
        regressor.predict_proba(INPUTS)
    assert caught.value.fix == "use predict"


def test_probabilities_of_outputs_that_are_not_finite_are_an_error():
    with pytest.raises(NumericError) as caught:
        classifier().predict_proba(torch.tensor([[1.0, 2.0], [torch.inf, 0.0]]))
    assert caught.value.where == "first for input 1"


@pytest.mark.parametrize(
    "convert",
    [
        torch.Tensor.double,
        torch.Tensor.half,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        lambda inputs: inputs.double().numpy(),
        lambda inputs: pandas.DataFrame(inputs.numpy(), columns=["length", "width"]),
    ],
    ids=["float64", "float16", "array", "list", "float64 array", "frame"],
)
def test_inputs_of_any_type_are_converted(convert):
    ensemble = classifier()
    assert torch.equal(ensemble(convert(INPUTS)), ensemble(INPUTS))
    assert ensemble.predict(convert(INPUTS)).tolist() == ["ant", "cow"]
    assert ensemble.predict_proba(convert(INPUTS)).dtype == torch.float32


@pytest.mark.parametrize(
    ("inputs", "hint"),
    [
        (torch.zeros(2), "inputs[None]"),
        (torch.zeros(4, 3), "the features that the run was trained on"),
        (torch.zeros(4, 1, 2), "inputs.reshape(-1, 2)"),
    ],
)
def test_inputs_of_another_shape_are_an_error_that_says_which_shape_is_expected(inputs, hint):
    with pytest.raises(ek.DataError) as caught:
        classifier()(inputs)
    assert f"expected inputs of shape (batch, 2), got {tuple(inputs.shape)}" in str(caught.value)
    assert hint in str(caught.value)


def test_images_with_channels_last_and_text_are_errors_with_a_hint():
    with pytest.raises(ek.DataError, match="move the channels"):
        image_classifier(normalise=False)(np.zeros((5, 2, 2, 1)))
    with pytest.raises(ek.DataError, match="expected numbers"):
        classifier()(np.array([["a", "b"]]))


def test_stored_images_are_prepared_as_in_training_and_floats_are_used_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 4, 4), dtype=np.uint8)
    ensemble = image_classifier()
    prepared = (pixels[:, :, 1:3, 1:3] / 255 - 0.25) / 0.5
    torch.testing.assert_close(ensemble(pixels), ensemble(prepared))
    plain = image_classifier(normalise=False)
    torch.testing.assert_close(plain(pixels[..., :2, :2]), plain(pixels[..., :2, :2] / 255))


def test_outputs_of_an_ensemble_in_evaluation_mode_are_detached_unless_gradients_are_asked_for():
    ensemble = classifier()
    for outputs in (ensemble(INPUTS), ensemble.member_outputs(INPUTS), ensemble.predict_proba(INPUTS)):
        assert not outputs.requires_grad
        outputs.add_(1)  # an ordinary tensor
    assert ensemble(INPUTS, enable_grad=True).requires_grad
    assert ensemble.train()(INPUTS).requires_grad
    inputs = INPUTS.clone().requires_grad_()
    ensemble.eval()(inputs).sum().backward()
    assert inputs.grad.tolist() == WEIGHTS.mean(dim=0).sum(dim=0).expand(2, 2).tolist()
    assert inputs.requires_grad
    with torch.no_grad():
        assert not ensemble(inputs, enable_grad=True).requires_grad


def test_an_output_that_is_not_finite_is_no_prediction():
    with pytest.raises(NumericError, match="2 members of 2 gave outputs that are not finite for 1 sample of 2"):
        classifier().predict(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ensemble: pickle.loads(pickle.dumps(ensemble))])
def test_a_copy_predicts_the_same_also_after_threads_have_started(copied):
    ensemble = classifier()
    expected = ensemble(INPUTS)
    twin = copied(ensemble)
    assert torch.equal(twin(INPUTS), expected)
    assert twin.predict(INPUTS).tolist() == ["ant", "cow"]
    nn.init.zeros_(twin.members[0][1].weight)
    assert torch.equal(ensemble(INPUTS), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_an_ensemble_of_another_precision_converts_its_inputs(dtype):
    ensemble = classifier().to(dtype)
    assert ensemble(INPUTS).dtype == dtype
    assert ensemble.predict(INPUTS.numpy()).tolist() == ["ant", "cow"]


def test_an_ensemble_moves_to_a_device_with_everything_it_needs():
    ensemble = image_classifier()
    ensemble.fitted = torch.ones(3)
    ensemble(torch.zeros(1, 1, 2, 2))
    moved = ensemble.to("meta")
    assert (moved.device, moved.fitted.device) == (torch.device("meta"), torch.device("meta"))
    pixels = torch.zeros(5, 1, 4, 4, dtype=torch.uint8)
    assert moved(pixels.to("meta")).shape == moved(torch.zeros(5, 1, 2, 2)).shape == (5, 2)
    assert moved(pixels).is_meta


def test_members_without_parameters_have_a_device_and_a_type():
    ensemble = ek.Ensemble([nn.Identity()], ek.load_spec(CLASSIFIER), ek.DataInfo("classification", (2,), 2)).eval()
    assert ensemble.predict(INPUTS.double()).tolist() == [0, 1]


def test_a_run_and_its_spec_are_shown_in_a_line(tmp_path):
    spec = {"data": "digits", "model": {"name": "mlp", "hidden": [2]}, "training": {"epochs": 1}}
    spec |= {"ensemble": {"members": 1}, "engine": {"name": "sequential"}}
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert repr(run) == f"Run('{tmp_path / 'run'}', finished, 1 epoch)"
    assert pickle.loads(pickle.dumps(run.spec)) == run.spec
    assert ek.load(tmp_path / "run", device="cpu").device.type == "cpu"
    with pytest.raises(ek.UsageError, match=r'"tpu9" is not a device.\n  at device'):
        ek.load(tmp_path / "run", device="tpu9")


def compute_in_a_fork() -> None:
    threads.num_cores = lambda: 2
    ensemble = classifier()
    inputs = INPUTS.repeat(200, 1)  # a small batch needs no threads
    expected = ensemble(inputs)
    assert ensemble._pool.pools
    ensemble._pool.lock.acquire()  # as another thread may, at the moment of the fork
    child = os.fork()
    if not child:
        assert ensemble._pool.lock.acquire(timeout=10)
        os._exit(0 if torch.equal(ensemble(inputs), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_process_has_threads_of_its_own():
    """Shown in a process of its own, which changes the number of cores."""
    process = get_context("fork").Process(target=compute_in_a_fork)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads exist; the child uses none of them
        process.start()
    process.join(120)
    assert process.exitcode == 0


def test_several_threads_may_use_one_ensemble():
    ensemble, results = classifier(), []
    workers = [threading.Thread(target=lambda: results.append(ensemble.predict(INPUTS).tolist())) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [["ant", "cow"]] * 8
