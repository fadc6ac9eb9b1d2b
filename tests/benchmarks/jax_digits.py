"""The training of specs/digits.toml in JAX: jit, vmap over the members, each epoch in one scan, optax's AdaBelief.

``python tests/benchmarks/jax_digits.py --members 8`` trains like ``ensemblekit train specs/digits.toml`` and prints the
accuracy after every epoch. With ``--serve`` it compiles an epoch on random data, answers ``ready``, and then times an
epoch for every line on its standard input: it prints the seconds per step.

Needs an environment of its own: ``pip install jax optax scikit-learn``.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from itertools import pairwise

import jax
import numpy
import optax
from jax import numpy as jnp

NUM_TRAIN, NUM_VALIDATION = 1298, 144
LAMBDA, SIZES, BATCH, MOMENTUM, EPS = 0.5, (64, 64, 64, 10), 64, 0.1, 1e-5


def new_member(key: jax.Array) -> tuple[dict, dict]:
    """Parameters and running statistics of one MLP with batch norm, initialised as torch does."""
    parameters, statistics = {}, {}
    for layer, (width, outputs) in enumerate(pairwise(SIZES)):
        key, first, second = jax.random.split(key, 3)
        bound = width**-0.5
        parameters[f"weight{layer}"] = jax.random.uniform(first, (width, outputs), minval=-bound, maxval=bound)
        parameters[f"bias{layer}"] = jax.random.uniform(second, (outputs,), minval=-bound, maxval=bound)
        if layer < len(SIZES) - 2:
            parameters[f"scale{layer}"], parameters[f"shift{layer}"] = jnp.ones(outputs), jnp.zeros(outputs)
            statistics[f"mean{layer}"], statistics[f"var{layer}"] = jnp.zeros(outputs), jnp.ones(outputs)
    return parameters, statistics


def apply(parameters: dict, statistics: dict, inputs: jax.Array, training: bool) -> tuple[jax.Array, dict]:
    """Outputs of one member and its new statistics."""
    updated = dict(statistics)
    for layer in range(len(SIZES) - 1):
        inputs = inputs @ parameters[f"weight{layer}"] + parameters[f"bias{layer}"]
        if layer < len(SIZES) - 2:
            mean, variance = statistics[f"mean{layer}"], statistics[f"var{layer}"]
            if training:
                count = len(inputs)
                mean, variance = inputs.mean(axis=0), inputs.var(axis=0)
                updated[f"mean{layer}"] = (1 - MOMENTUM) * statistics[f"mean{layer}"] + MOMENTUM * mean
                unbiased = variance * count / (count - 1)
                updated[f"var{layer}"] = (1 - MOMENTUM) * statistics[f"var{layer}"] + MOMENTUM * unbiased
            inputs = (inputs - mean) * jax.lax.rsqrt(variance + EPS)
            inputs = jax.nn.relu(inputs * parameters[f"scale{layer}"] + parameters[f"shift{layer}"])
    return inputs, updated


def objective(parameters: dict, statistics: dict, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, dict]:
    """GNCL's upper bound with cross-entropy."""
    outputs, updated = jax.vmap(partial(apply, training=True), in_axes=(0, 0, None))(parameters, statistics, inputs)
    loss = optax.softmax_cross_entropy_with_integer_labels
    members = loss(outputs, jnp.broadcast_to(targets, outputs.shape[:2])).mean()
    joint = loss(outputs.mean(axis=0), targets).mean()
    return LAMBDA * joint + (1 - LAMBDA) * members, updated


def make_epoch(optimizer: optax.GradientTransformation) -> callable:
    """A compiled epoch: (state, batches, targets) → (state, objectives)."""

    def step(state: tuple, batch: tuple) -> tuple[tuple, jax.Array]:
        parameters, statistics, moments = state
        (value, statistics), gradient = jax.value_and_grad(objective, has_aux=True)(parameters, statistics, *batch)
        updates, moments = optimizer.update(gradient, moments, parameters)
        return (optax.apply_updates(parameters, updates), statistics, moments), value

    return jax.jit(lambda state, *data: jax.lax.scan(step, state, data), donate_argnums=0)


def new_state(members: int, optimizer: optax.GradientTransformation) -> tuple:
    """Parameters, statistics and moments of all members."""
    parameters, statistics = jax.vmap(new_member)(jax.random.split(jax.random.key(0), members))
    return parameters, statistics, optimizer.init(parameters)


def serve(members: int, steps: int) -> None:
    """Time an epoch of random batches for every line that is read."""
    optimizer = optax.adabelief(1e-3, eps=1e-12)
    epoch, state = make_epoch(optimizer), new_state(members, optimizer)
    source = numpy.random.default_rng(0)
    inputs = jnp.asarray(source.normal(size=(steps, BATCH, SIZES[0])), jnp.float32)
    targets = jnp.asarray(source.integers(SIZES[-1], size=(steps, BATCH)))
    state, _ = jax.block_until_ready(epoch(state, inputs, targets))
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        state, _ = jax.block_until_ready(epoch(state, inputs, targets))
        print((time.perf_counter() - started) / steps, flush=True)


def train(members: int, epochs: int) -> None:
    """Train on the digits, and evaluate on validation and test data after every epoch."""
    from sklearn.datasets import load_digits

    digits, shuffled = load_digits(), numpy.random.default_rng(0)
    order = shuffled.permutation(len(digits.images))
    images = digits.images.reshape(-1, SIZES[0])[order].astype(numpy.float32) / 16
    classes = digits.target[order]
    held_out = {
        "validation": slice(NUM_TRAIN, NUM_TRAIN + NUM_VALIDATION),
        "test": slice(NUM_TRAIN + NUM_VALIDATION, None),
    }
    whole, rest = NUM_TRAIN // BATCH, NUM_TRAIN % BATCH
    schedule = optax.cosine_decay_schedule(1e-2, epochs * (whole + 1))
    optimizer = optax.adabelief(schedule, eps=1e-12)
    epoch, state = make_epoch(optimizer), new_state(members, optimizer)

    @jax.jit
    def accuracy(state: tuple, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        run = jax.vmap(partial(apply, training=False), in_axes=(0, 0, None))
        return (run(state[0], state[1], inputs)[0].mean(axis=0).argmax(axis=-1) == targets).mean()

    for number in range(epochs):
        order = shuffled.permutation(NUM_TRAIN)
        batches = order[: whole * BATCH].reshape(whole, BATCH)
        state, _ = epoch(state, images[batches], classes[batches])
        state, _ = epoch(state, images[order[-rest:]][None], classes[order[-rest:]][None])
        accuracies = [f"{name} {accuracy(state, images[part], classes[part]):.4f}" for name, part in held_out.items()]
        print(f"epoch {number + 1}: {', '.join(accuracies)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--serve", action="store_true", help="time epochs on demand")
    options = parser.parse_args()
    serve(options.members, 50) if options.serve else train(options.members, options.epochs)
