"""The binary network: binary weights and activations, straight-through gradients, and it learns."""

from __future__ import annotations

import pytest
import torch
from ensemblekit_models.binary_resnet import BinaryResNet, _BinaryActivation, binarise
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ensemblekit as ek
from ensemblekit.members.build import build_members


class Products(TorchFunctionMode):
    """Records the inputs, the weight and the padding of every convolution and linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, object]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("conv2d", "linear", "addmm", "matmul"):
            self.seen.append((args[0].detach(), args[1].detach(), (kwargs or {}).get("padding", 0)))
        return function(*args, **(kwargs or {}))


def is_binary(values: Tensor) -> bool:
    return set(values.unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_every_product_but_the_first_input_is_of_plus_and_minus_one(training, stochastic):
    network = ek.build_model({"name": "binary_resnet", "width": 8, "stochastic": stochastic}, (3, 32, 32), 10)
    network.train(training)
    with Products() as products:
        network(torch.rand(4, 3, 32, 32))
    assert len(products.seen) == 1 + 2 * 4 + 1
    assert all(is_binary(weight) for _, weight, _ in products.seen)
    (first, _, _), *others = products.seen
    assert not is_binary(first)
    assert all(is_binary(inputs) and padding == 0 for inputs, _, padding in others)


def test_binary_resnet_has_the_parameters_of_resnet_and_an_output_scale():
    sizes = [
        sum(parameter.numel() for parameter in ek.build_model(name, (3, 32, 32), 100).parameters())
        for name in ("binary_resnet", "resnet")
    ]
    assert sizes == [88_101, 88_100]


def test_the_gradient_passes_straight_through_and_stops_outside_of_one():
    values = torch.tensor([-2.0, -1.0, -0.3, -0.0, 0.0, 0.3, 1.0, 2.0, torch.inf], requires_grad=True)
    factors = torch.arange(1.0, 10.0)
    signs = binarise(values)
    assert signs.tolist() == [-1, -1, -1, 1, 1, 1, 1, 1, 1]
    (signs * factors).sum().backward()
    assert values.grad.tolist() == [0, 2, 3, 4, 5, 6, 7, 0, 0]


@pytest.mark.parametrize("value", [-1.5, -1.0, -0.5, 0.0, 0.8, 1.0, 3.0])
def test_activations_in_training_are_plus_one_with_the_probability_of_the_hard_sigmoid(value):
    torch.manual_seed(0)
    activations = _BinaryActivation(stochastic=True)(torch.full((100_000,), value))
    probability = min(max((value + 1) / 2, 0), 1)
    tolerance = 5 * (probability * (1 - probability) / 100_000) ** 0.5  # five standard deviations, none at the ends
    assert float((activations == 1).float().mean()) == pytest.approx(probability, abs=tolerance + 1e-9)


def test_evaluation_is_deterministic_and_stochastic_training_is_not():
    network = ek.build_model({"name": "binary_resnet", "width": 4, "blocks": 1}, (1, 8, 8), 3)
    images = torch.rand(8, 1, 8, 8)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))
    deterministic = ek.build_model(
        {"name": "binary_resnet", "width": 4, "blocks": 1, "stochastic": False}, (1, 8, 8), 3
    )
    assert torch.equal(deterministic(images), deterministic(images))


def test_nan_stays_nan():
    assert bool(binarise(torch.tensor([torch.nan])).isnan().all())


@pytest.fixture
def one_thread():
    """Threads slow down networks this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return train_test_split(images, torch.tensor(labels), test_size=450, random_state=0, stratify=labels)


def accuracy_after_training(digits, num_members: int, width: int, epochs: int) -> float:
    """Test accuracy of the ensemble after end-to-end training."""
    train_images, test_images, train_labels, test_labels = digits
    model = BinaryResNet(width=width, blocks=2)
    members = nn.ModuleList(build_members([model] * num_members, (1, 8, 8), 10, seed=0))
    optimizer = torch.optim.Adam(members.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    torch.manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(train_labels)).split(64):
            outputs = torch.stack([member(train_images[batch]) for member in members])
            optimizer.zero_grad()
            ek.objective("end_to_end", outputs, train_labels[batch]).backward()
            optimizer.step()
        schedule.step()
    members.eval()
    with torch.no_grad():
        outputs = torch.stack([member(test_images) for member in members])
    return ek.evaluate(outputs, test_labels)["accuracy"]


def test_a_binary_member_reaches_90_percent_on_digits(digits, one_thread):
    assert accuracy_after_training(digits, num_members=1, width=16, epochs=8) > 0.9


def test_an_end_to_end_ensemble_of_binary_members_beats_a_single_one(digits, one_thread):
    single = accuracy_after_training(digits, num_members=1, width=8, epochs=2)
    ensemble = accuracy_after_training(digits, num_members=3, width=8, epochs=2)
    assert ensemble > single + 0.1
