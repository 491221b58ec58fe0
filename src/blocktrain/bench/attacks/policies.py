"""What an attacker makes of an honest update: pure numpy, one row of `ATTACKS` each.

An attacker trains as everybody does (on other text, if the row has a `text`), and then sends what
`change` makes of it. To add one, write a function and put it into the table: the attack matrix and
`blocktrain chaos` take it from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from blocktrain.protocol.tensors import Array, Tensors


@dataclass(frozen=True)
class HonestUpdate:
    """What an attacker has at hand when it must answer a task."""

    delta: Tensors
    """What its training has changed."""
    number: int
    """Updates that it has sent before."""
    draw: np.random.Generator
    """Where its chance comes from; the same seed attacks in the same way."""
    direction: int = 0
    """A seed that all attackers of a run share, for what they do together."""
    others: Sequence[Tensors] = ()
    """Updates of others that it could read, newest last."""
    weights: Tensors = field(default_factory=dict)
    """What it started from."""


Change = Callable[[HonestUpdate], Tensors]
TextChange = Callable[[Array, int], Array]
"""(ids, size of the vocabulary) -> the ids that are trained on instead."""


def norm(delta: Tensors) -> float:
    """Length over all tensors."""
    return math.sqrt(
        math.fsum(float(np.sum(np.square(t, dtype=np.float64))) for t in delta.values())
    )


def scaled(delta: Tensors, factor: float) -> Tensors:
    return {name: np.asarray(factor * t, dtype=t.dtype) for name, t in delta.items()}


def _random(delta: Tensors, draw: np.random.Generator) -> Tensors:
    """A random direction, as long as a delta."""
    noise: Tensors = {
        name: draw.standard_normal(delta[name].shape).astype(delta[name].dtype)
        for name in sorted(delta)
    }
    return scaled(noise, norm(delta) / max(norm(noise), 1e-30))


def send_honestly(update: HonestUpdate) -> Tensors:
    return update.delta


def zeros(update: HonestUpdate) -> Tensors:
    return scaled(update.delta, 0.0)


def noise(update: HonestUpdate) -> Tensors:
    return _random(update.delta, update.draw)


def flip(update: HonestUpdate) -> Tensors:
    return scaled(update.delta, -1.0)


def scale_up(update: HonestUpdate) -> Tensors:
    return scaled(update.delta, 100.0)


def flip_and_scale(update: HonestUpdate) -> Tensors:
    return scaled(update.delta, -100.0)


def shrink(update: HonestUpdate) -> Tensors:
    return scaled(update.delta, 1e-3)


def giant_first(update: HonestUpdate) -> Tensors:
    """Before a block knows what is usual; later ones are honest, to be trusted."""
    return scaled(update.delta, 1e4) if update.number == 0 else update.delta


def not_a_number(update: HonestUpdate) -> Tensors:
    broken = {name: t.copy() for name, t in update.delta.items()}
    broken[min(broken)].reshape(-1)[0] = np.nan
    return broken


def drift(update: HonestUpdate) -> Tensors:
    """Mostly honest, and a little in the direction that all attackers share."""
    shared = _random(update.delta, np.random.default_rng(update.direction))
    mixed = {name: t + 0.7 * shared[name] for name, t in update.delta.items()}
    return scaled(mixed, norm(update.delta) / max(norm(mixed), 1e-30))


def sleep_and_flip(update: HonestUpdate) -> Tensors:
    """A turncoat: honest until it is trusted, then as long as the clip may let pass."""
    return update.delta if update.number < 10 else scaled(update.delta, -3.0)


def stay_under_the_clip(update: HonestUpdate) -> Tensors:
    """The opposite, as long as the clip lets pass whole."""
    return scaled(update.delta, -2.9)


def replace_weights(update: HonestUpdate) -> Tensors:
    """Other weights instead of better ones: those of each tensor, shuffled."""
    before = update.weights or update.delta
    return {name: update.draw.permuted(t, axis=None) - t for name, t in before.items()}


def flat(update: HonestUpdate) -> Tensors:
    """The same number everywhere: a payload of a few bytes that decodes to a whole block."""
    size = sum(t.size for t in update.delta.values())
    value = norm(update.delta) / math.sqrt(size)
    return {name: np.full_like(t, value) for name, t in update.delta.items()}


def copy(update: HonestUpdate) -> Tensors:
    """What another one has sent, as its own; what it has trained itself if it can read none."""
    return update.others[-1] if update.others else update.delta


def read_as_it_is(ids: Array, vocabulary: int) -> Array:
    return ids


def read_mirrored(ids: Array, vocabulary: int) -> Array:
    """Every token is another one: labels flip, and inputs with them."""
    return vocabulary - 1 - ids


@dataclass(frozen=True)
class Attack:
    """One row: how an update is changed, and what is trained on."""

    sentence: str
    change: Change
    text: TextChange = read_as_it_is
    reads_others: bool = False
    reads_canary: bool = False
    """Trains on the text on which the last round was judged."""


ATTACKS: dict[str, Attack] = {
    "zeros": Attack("sends an update that changes nothing", zeros),
    "noise": Attack("sends random numbers, as long as an honest update", noise),
    "sign-flip": Attack("sends the opposite of what it trained", flip),
    "scale-100": Attack("sends a hundred times what it trained", scale_up),
    "flip-100": Attack("sends minus a hundred times what it trained", flip_and_scale),
    "shrink": Attack("sends a thousandth of what it trained", shrink),
    "label-flip": Attack(
        "trains on text in which every token is another", send_honestly, read_mirrored
    ),
    "giant-first": Attack("sends a giant first update, and honest ones later", giant_first),
    "nan": Attack("sends a number that is none", not_a_number),
    "drift": Attack("leans a little into a direction that all attackers share", drift),
    "turncoat": Attack(
        "is honest ten times, and then sends the opposite, three times", sleep_and_flip
    ),
    "under-clip": Attack(
        "sends the opposite, just short enough not to be clipped", stay_under_the_clip
    ),
    "random-weights": Attack("sends its weights in another order", replace_weights),
    "canary-overfit": Attack(
        "trains on the text of the last judgement alone", send_honestly, reads_canary=True
    ),
    "flat": Attack("sends few bytes that decode to a whole block", flat),
    "copy": Attack("sends the update of another as its own", copy, reads_others=True),
}
