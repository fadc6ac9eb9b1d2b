"""Mixup and CutMix against their formulas, and batches that carry partners and shares."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from ensemblekit_mixes.cutmix import Cutmix
from ensemblekit_mixes.mixup import Mixup
from scipy import stats

import ensemblekit as ek
from ensemblekit.core.errors import PluginError, SpecError
from ensemblekit.core.registry import discover
from ensemblekit.spec.reader import load_spec

SPEC = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "ensemble": {"members": 2}}


def sampled(mix: ek.BatchAugmentation, number: int) -> torch.Tensor:
    return mix.sample(number, torch.Generator().manual_seed(0))


def digits(mix: ek.BatchAugmentation) -> ek.Data:
    return ek.load_data(ek.datasets()["digits"].load()(limit_train=50), seed=0).mixed_by(mix)


@pytest.mark.parametrize("shape", [(5,), (3, 4, 4)])
def test_mixup_is_the_convex_combination_of_a_sample_and_its_partner(shape):
    inputs = torch.randn(20, *shape)
    mixed, partner, share = Mixup(alpha=1.0).apply(inputs, sampled(Mixup(alpha=1.0), 20))
    for b in range(20):
        expected = float(share[b]) * inputs[b] + (1 - float(share[b])) * inputs[int(partner[b])]
        torch.testing.assert_close(mixed[b], expected)
    assert sorted(partner.tolist()) == list(range(20))


@pytest.mark.parametrize("mix", [Mixup(alpha=0.3), Cutmix(alpha=2.0)], ids=lambda mix: mix.name)
def test_shares_have_the_beta_distribution(mix):
    shares = sampled(mix, 4000)[:, 1].numpy()
    assert stats.kstest(shares, stats.beta(mix.alpha, mix.alpha).cdf).pvalue > 1e-3


def test_cutmix_cuts_the_rectangles_of_the_reference_implementation():
    inputs = torch.randn(60, 3, 9, 14)
    numbers = sampled(Cutmix(), 60)
    mixed, partner, share = Cutmix().apply(inputs, numbers)
    for b, (_, drawn, row, column) in enumerate(numbers.tolist()):
        # rand_bbox of the authors' code, with int(…) and // as there
        ratio = np.sqrt(np.float32(1) - np.float32(drawn))
        bounds = []
        for size, centre in ((9, row), (14, column)):
            cut, middle = int(size * ratio), int(centre * size)
            bounds.append(np.clip([middle - cut // 2, middle + cut // 2], 0, size))
        (top, bottom), (left, right) = bounds
        expected = inputs[b].clone()
        expected[:, top:bottom, left:right] = inputs[int(partner[b]), :, top:bottom, left:right]
        assert torch.equal(mixed[b], expected)
        assert float(share[b]) == pytest.approx(1 - (bottom - top) * (right - left) / (9 * 14))


def test_batches_carry_partners_and_shares_and_own_targets():
    data = digits(Mixup(alpha=1.0))
    plain = digits(None).train.training_batches(16, seed=3, epoch=2)
    for batch, unmixed in zip(data.train.training_batches(16, seed=3, epoch=2), plain, strict=True):
        assert torch.equal(batch.index, unmixed.index)
        assert torch.equal(batch.targets, unmixed.targets)
        own = batch.share.view(-1, 1, 1, 1)
        torch.testing.assert_close(batch.inputs, own * unmixed.inputs + (1 - own) * unmixed.inputs[batch.partner])
        assert (unmixed.partner, unmixed.share) == (None, None)


def test_evaluation_and_unaugmented_batches_are_not_mixed():
    data = digits(Mixup())
    for batches in (data.test.batches(16), data.train.training_batches(16, 0, 1, augment=False), data.train.batches(9)):
        assert all(batch.partner is None and batch.share is None for batch in batches)


@pytest.mark.parametrize("mix", [Mixup(), Cutmix()], ids=lambda mix: mix.name)
def test_an_epoch_that_is_resumed_in_the_middle_has_identical_batches(mix):
    train = digits(mix).train
    whole = list(train.training_batches(8, seed=1, epoch=4))
    resumed = list(train.training_batches(8, seed=1, epoch=4, first_step=3))
    assert len(resumed) == len(whole) - 3
    for left, right in zip(whole[3:], resumed, strict=True):
        for name in ("inputs", "targets", "index", "partner", "share"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name


def test_epochs_and_seeds_are_mixed_differently():
    train = digits(Mixup(alpha=1.0)).train
    shares = [
        torch.cat([batch.share for batch in train.training_batches(8, seed, epoch)])
        for seed, epoch in ((0, 1), (0, 2), (1, 1))
    ]
    assert not any(torch.equal(left, right) for left, right in pairwise([*shares, shares[0]]))


@pytest.mark.parametrize("written", ["mixup", {"name": "mixup", "alpha": 0.4}])
def test_a_spec_names_a_mix_and_keeps_it(written):
    spec = load_spec({**SPEC, "training": {"mix": written}}, None, discover())
    assert spec.mix == Mixup(alpha=0.2 if written == "mixup" else 0.4).named("mixup")
    assert load_spec(spec.to_dict(), None, discover()) == spec
    assert load_spec(SPEC, None, discover()).mix is None


def test_cutmix_is_refused_for_rows_of_a_table():
    tables = {**SPEC, "data": {"name": "diabetes"}, "training": {"mix": "cutmix"}}
    with pytest.raises(SpecError, match="cuts rectangles out of images"):
        load_spec(tables, None, discover())


def test_a_mix_that_returns_wrong_shapes_is_named():
    class Halved(Mixup):
        """Forgets half of the batch."""

        def apply(self, inputs, sampled):
            return tuple(values[: len(inputs) // 2] for values in super().apply(inputs, sampled))

    with pytest.raises(PluginError, match=r"(?s)apply\(\) returned tensors of shapes .*halved"):
        next(digits(Halved()).train.training_batches(8, 0, 1))
