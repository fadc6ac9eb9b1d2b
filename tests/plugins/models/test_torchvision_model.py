"""Networks of torchvision: any name, any head, any channels, and clear words when weights are not there."""

from __future__ import annotations

from urllib.error import URLError

import pytest
import torch
from ensemblekit_models.torchvision_model import TorchVision
from pydantic import ValidationError
from torchvision import models

import ensemblekit as ek

SMALL = "squeezenet1_1"
WEIGHTS_FILE = "squeezenet1_1-b8a52dc0.pth"


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """An empty folder of downloaded weights, and no network."""

    def refuse(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def test_a_misspelt_arch_is_answered_with_the_nearest_name():
    with pytest.raises(ValidationError, match='did you mean "resnet18"'):
        TorchVision(arch="resnet_18")


def test_no_name_of_a_network_for_another_task_is_taken():
    with pytest.raises(ValidationError, match="not a classification network"):
        TorchVision(arch="fcn_resnet50")


def test_naming_an_arch_builds_nothing(monkeypatch):
    monkeypatch.setattr(models, "get_model", lambda *_, **__: pytest.fail("built"))
    assert TorchVision(arch="vit_h_14").arch == "vit_h_14"


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_heads_return_a_plain_tensor_in_training(arch):
    with torch.device("meta"):
        network = TorchVision(arch=arch).build((3, 96, 96), 4).train()
        assert network(torch.empty(2, 3, 96, 96)).shape == (2, 4)


@pytest.mark.parametrize("arch", ["resnet18", "squeezenet1_1", "mobilenet_v3_small"])
def test_the_first_convolution_fits_other_channels(arch):
    network = ek.build_model({"name": "torchvision", "arch": arch}, (1, 32, 32), 4)
    assert network.to("meta")(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 4)


def test_a_new_network_is_torchvisions_own():
    network = ek.build_model("torchvision", (3, 32, 32), 10)
    theirs = models.resnet18(num_classes=10)
    theirs.load_state_dict(network.state_dict())
    images = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(network.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize(("arch", "side"), [("alexnet", 32), ("inception_v3", 64), ("vit_b_16", 40), ("maxvit_t", 64)])
def test_images_of_a_size_that_the_network_cannot_take_are_refused(arch, side):
    with pytest.raises(ek.UsageError, match=rf'"{arch}" does not support images of {side}×{side}'):
        ek.build_model({"name": "torchvision", "arch": arch}, (3, side, side), 10)


def test_pretrained_weights_are_kept_but_for_the_head(checkpoints):
    torch.manual_seed(0)
    original = models.squeezenet1_1()
    torch.save(original.state_dict(), checkpoints / WEIGHTS_FILE)
    network = ek.build_model({"name": "torchvision", "arch": SMALL, "pretrained": True}, (3, 64, 64), 7)
    head = ("classifier.1.weight", "classifier.1.bias")
    state = network.state_dict()
    assert all(torch.equal(state[name], value) for name, value in original.state_dict().items() if name not in head)
    assert state[head[0]].shape == (7, 512, 1, 1)


def test_a_linear_head_is_replaced_too(checkpoints):
    torch.save(models.shufflenet_v2_x0_5().state_dict(), checkpoints / "shufflenetv2_x0.5-f707e7126e.pth")
    table = {"name": "torchvision", "arch": "shufflenet_v2_x0_5", "pretrained": True}
    assert ek.build_model(table, (3, 64, 64), 7).fc.weight.shape == (7, 1024)


def test_missing_weights_are_named_with_the_place_where_they_belong(checkpoints):
    with pytest.raises(ek.DataError) as caught:
        ek.build_model({"name": "torchvision", "arch": SMALL, "pretrained": True}, (3, 64, 64), 7)
    message = str(caught.value)
    assert WEIGHTS_FILE in message
    assert str(checkpoints) in message
    assert "pretrained = false" in message


class Payload:
    """What an attacker would put into a file of weights."""

    def __reduce__(self):
        return (pytest.fail, ("executed",))


@pytest.mark.parametrize("content", ["cut", "other", "pickle"])
def test_a_file_that_holds_other_things_than_the_weights_is_refused(checkpoints, content):
    file = checkpoints / WEIGHTS_FILE
    torch.save({"pickle": Payload(), "other": {}, "cut": models.squeezenet1_1().state_dict()}[content], file)
    if content == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ek.DataError, match="not the pretrained weights") as caught:
        ek.build_model({"name": "torchvision", "arch": SMALL, "pretrained": True}, (3, 64, 64), 7)
    assert caught.value.where == str(file)


def test_pretrained_weights_are_for_colour_images(checkpoints):
    with pytest.raises(ek.UsageError, match="3 channels, but these have 1"):
        ek.build_model({"name": "torchvision", "pretrained": True}, (1, 64, 64), 7)


def test_pretrained_transformers_take_only_the_size_that_they_were_trained_for(checkpoints):
    with pytest.raises(ek.UsageError, match="Expected 224 but got 64"):
        ek.build_model({"name": "torchvision", "arch": "vit_b_32", "pretrained": True}, (3, 64, 64), 7)
