"""What two models differ in, where no table makes their answers the same, in words.

Takes what leaves influence (see ``influence``); gives sentences in which all numbers
were measured. A cause is said to be typical, never to be the one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from treeadapt.porting.matching.first_calls import said_of_strange
from treeadapt.porting.matching.influence import (
    LEAST,
    SMALL,
    Carrier,
    Influences,
    Unit,
)
from treeadapt.porting.matching.sides import flat_of
from treeadapt.porting.measure import apart, errors_of
from treeadapt.text.names import listing

_FAR_SMALLER = 0.25, SMALL, SMALL / 4  # of all numbers
_GROWS = 1.2  # times the difference, the smaller numbers are
_MUCH = 5  # times the difference at usual size
_DIVIDES = 1.8  # times the difference, with variances of a quarter
_ADDED = 0.05  # of a difference may change, and it is the same
_MOST_OF_EPSILON = 0.1  # of a difference at usual size
_NONE_WHERE_SMALL = 1e-4
_MUCH_OF_ALL = 0.1  # of an influence
_FAR_FEWER = 300  # times less than the whole difference is none
_EPSILON = (
    "{}. Typical of an epsilon: compare those of the norms (1e-5 in PyTorch, 1e-6 in "
    "Flax, 1e-3 in Keras, 1e-12 in BERT)"
)
_SMALLER = "the smaller {}, the more the two differ{}"
_ACTIVATION = (
    "compare the activation (ReLU, GELU, SiLU) or, if it is attention, the masks, "
    "their values, and the scale of the scores"
)


def what_differs(seen: Influences, *, only_small: bool = False) -> Iterator[str]:
    """Yield what both models differ in, the most telling first.

    Args:
        seen: what leaves influence.
        only_small: whether the models are known to differ where numbers are small, and
            nowhere else.
    """
    if seen.whole <= seen.same and seen.small <= _NONE_WHERE_SMALL:
        return
    strange = _not_comparable(seen)
    if strange:
        yield strange
        return
    smaller = _where_smaller(seen)
    if smaller:
        yield smaller
    if smaller or only_small:
        return
    carriers = seen.carriers()
    text = _through(seen, carriers) if carriers else _without_layers(seen)
    yield (
        "with numbers that no usual order of axes changes, the two differ by "
        f"{seen.whole:.2g}. {text}"
    )
    first = _first_entries(seen)
    if first:
        yield first


def _not_comparable(seen: Influences) -> str:
    """Say which model answers NaN, infinite numbers or other integers, if one does."""
    kinds = "(normal ones in arrays, positive ones in vectors)"
    for size, what in ((1.0, "of usual size"), (SMALL, "a 20th of usual size")):
        sizes = {"arrays": size, "vectors": size}
        old, new = seen.old.answers(**sizes), seen.new.answers(**sizes)
        if math.isfinite(apart(new, old)):
            continue
        text = said_of_strange(f"{what} {kinds}", old, new)
        if text:
            return text
        if size == 1:
            return (
                "with numbers that no usual order of axes changes, the two answer "
                "other integers or booleans: return what they are computed from"
            )
    return ""


def _where_smaller(seen: Influences) -> str:
    """Say that the difference grows as numbers get smaller, if it always does."""
    if seen.whole > _MOST_OF_EPSILON:
        return ""
    for name, kinds in (
        ("arrays are", ["arrays"]),
        ("numbers are", ["arrays", "vectors"]),
    ):
        sizes = (4.0, 1.0, 0.25, SMALL)
        steps = [seen.apart((), (), **dict.fromkeys(kinds, size)) for size in sizes]
        large = [each for each in steps if each > LEAST]
        grows = all(two > _GROWS * one for one, two in itertools.pairwise(large))
        is_much = steps[-1] >= _MUCH * max(steps[1], LEAST)
        if grows and is_much and len(large) > 1 and not _is_added(seen, kinds):
            by = f"by {steps[1]:.1g} at usual size, by {steps[-1]:.1g} at a 20th"
            return _EPSILON.format(_SMALLER.format(name, f": {by}"))
    divisors = _divisors(seen)
    if divisors:
        return _EPSILON.format(_SMALLER.format(f"{_names(divisors)} is", ""))
    return _where_all_are_small(seen)


def _where_all_are_small(seen: Influences) -> str:
    """Say that models differ by far more where all numbers are small, if they do.

    At usual size biases and a tied head hide how a difference grows. That of an epsilon
    grows faster than numbers get smaller, which what is added once does not.
    """
    kinds = ["arrays", "vectors"]
    usual, *steps = (
        seen.apart((), (), **dict.fromkeys(kinds, size))
        for size in (1.0, *_FAR_SMALLER)
    )
    one, two, three = steps
    least = max(one, LEAST)
    grows = two > 2 * _FAR_SMALLER[0] / SMALL * least and three > _GROWS * two
    is_much = two >= _MUCH * max(usual, LEAST) and math.isfinite(three)
    if not grows or not is_much or _is_added(seen, kinds):
        return ""
    return _EPSILON.format(
        f"where all numbers are small the two differ more: by {usual:.1g} at usual "
        f"size, by {two:.1g} at a 20th, by {three:.1g} at an 80th"
    )


def _differences(
    seen: Influences, old: Unit, new: Unit, kinds: Sequence[str], sizes: Sequence[float]
) -> list[np.ndarray]:
    """Return by how much answers differ, not relative, with leaves of some sizes."""
    return [
        flat_of(seen.new.answers(new, size, **dict.fromkeys(kinds, size)))
        - flat_of(seen.old.answers(old, size, **dict.fromkeys(kinds, size)))
        for size in sizes
    ]


def _is_added(seen: Influences, kinds: Sequence[str]) -> bool:
    """Return whether the same is added on one side, whatever size numbers have.

    Relative to answers that get smaller, it grows as well.
    """
    usual, small = _differences(seen, (), (), kinds, (1.0, 0.25))
    return bool(np.linalg.norm(usual - small) < _ADDED * np.linalg.norm(usual))


def _divides(seen: Influences, old: Unit, new: Unit) -> bool:
    """Return whether the models differ the more, the smaller some leaves are.

    Not relative to the answers, which a large vector on both sides would change. The
    leaves are made far smaller: without biases that hide a difference, it grows too,
    but not for ever.
    """
    sizes = (4.0, 1.0, 0.25, 1 / 16, 1 / 64)
    steps = map(np.linalg.norm, _differences(seen, old, new, (), sizes))
    return all(two > _DIVIDES * one for one, two in itertools.pairwise(steps))


def _divisors(seen: Influences) -> Unit:
    """Return vectors that are the smaller, the more the models differ: variances."""
    for old, new in itertools.product(seen.old.vectors(), seen.new.vectors()):
        if seen.are_like(old, new) and _divides(seen, old, new):
            return old
    return ()


def _through(seen: Influences, carriers: Sequence[Carrier]) -> str:
    """Say through which leaves the difference goes, and of what it is typical."""
    first = carriers[0]
    text = f"They agree once {_names(first.old)} is zero"
    partner = seen.partner(first, carriers)
    if partner is not None:
        return (
            f"{text}, or {_names(partner.old)}: they differ in what these two make "
            f"together, as in scores of attention. {_scores(seen, first)}"
        )
    scores = seen.scores_below(first)
    if scores:
        return (
            f"{text}, and not once {_names(scores, ' or ')} is, which make scores of "
            "attention. Typical of masks: compare the causal one, windows, padding, "
            "and the value of what is masked"
        )
    return f"{text}: they differ in what goes through it. {_by_size(seen, first)}"


def _scores(seen: Influences, carrier: Carrier) -> str:
    share = seen.share(carrier.old, carrier.new)
    if seen.agree_small(carrier):
        return "Small scores count alike, and large ones do not: compare a soft cap"
    if share.is_factor:
        return (
            f"Small scores count {share.factor:.2g} times as much in the old model: "
            "compare their scale, as one by the root of the head's size"
        )
    return (
        "No factor of these makes small scores count alike: compare the positions, as "
        "the base and the offset of rotary embeddings, the number of heads, and what "
        "is done to scores: a cap, or a scale behind a norm of queries and keys"
    )


def _by_size(seen: Influences, carrier: Carrier) -> str:
    """Say how what goes through a leaf differs where it is small."""
    share = seen.share(carrier.old, carrier.new)
    if share.is_factor:
        return (
            f"It counts {share.factor:.2g} times as much in the old model: compare "
            "factors"
        )
    small = seen.agree_where_small(carrier)
    if small and not _agree_below_zero(seen, carrier):
        return (
            "Where numbers are small the two agree if vectors, such as biases, are "
            "positive, and not if they are negative: typical of activations that "
            "differ below zero, as ReLU and leaky ReLU"
        )
    if small or seen.agree_small(carrier):
        return (
            "Where numbers are small the two agree: typical of GELU by erf "
            "(PyTorch) or by tanh (JAX), of GELU and SiLU, a clip, a cap or the value "
            "of a mask"
        )
    if small is None:
        return (
            f"Whether they agree where numbers are small, rounding hides: {_ACTIVATION}"
        )
    if any(each.lost for each in seen.beside(carrier)):
        return f"The two differ where numbers are small, too: {_ACTIVATION}"
    if {*carrier.old} & seen.old.arrays:
        return (
            "The two differ where numbers are small, too: compare how it is used, as "
            "the padding of a convolution, the offset and the order of positions, or "
            "the masks of attention"
        )
    return "The two differ where numbers are small, too: compare step by step"


def _agree_below_zero(seen: Influences, carrier: Carrier) -> bool:
    """Return whether nothing says that models differ where vectors are negative.

    Negative variances make no finite answers, which say nothing.
    """
    sizes = {"arrays": 1 / 16, "vectors": -1 / 16}
    sides = seen.old, seen.new
    if not all(np.isfinite(flat_of(side.answers(**sizes))).all() for side in sides):
        return True
    return seen.agree_where_small(carrier, -1) is not False


def _without_layers(seen: Influences) -> str:
    """Say whether the answers are the same without the arrays of all layers."""
    units = _layers(seen)
    if not all(units):
        return "No leaf that is zero makes them agree: compare step by step"
    names = listing(units[0], limit=3, write=str)
    left = seen.apart(*units)
    if left <= seen.same:
        return (
            f"They agree once {names} are all zero, and not before: compare, in a "
            "layer, the order of norms and sums, the activation, what a router makes "
            "of its scores, and factors of what is added"
        )
    if not math.isfinite(left):
        return (
            f"Once {names} are all zero, one answers NaN, infinite numbers or other "
            "integers"
        )
    text = f"They differ by {left:.2g} once {names} are all zero, too"
    cause = _past_layers(seen, units)
    if cause:
        return f"{text}. {cause}"
    return (
        f"{text}: compare the "
        "norms (before or after what they belong to, the last one), the activation, "
        "residuals, pooling, what gates apply to, a cap of the answers, and factors of "
        "the embedding or of the answers"
    )


def _layers(seen: Influences) -> tuple[Unit, Unit]:
    """Return the arrays of layers on both sides; none if they are not as many."""
    sides = seen.old, seen.new
    each = [[n for n in sorted(s.arrays) if len(s.spots[n]) > 1] for s in sides]
    # A number in two names, as of an embedding and a head, does not make layers.
    shared = set.intersection(
        *({s.group[n] for n in names} for s, names in zip(sides, each, strict=True))
    )
    old, new = (
        tuple(n for n in names if s.group[n] in shared)
        for s, names in zip(sides, each, strict=True)
    )
    counts = [
        Counter(s.group[n] for n in names for _ in s.spots[n])
        for s, names in zip(sides, (old, new), strict=True)
    ]
    return (old, new) if counts[0] == counts[1] else ((), ())


def _past_layers(seen: Influences, layers: tuple[Unit, Unit]) -> str:
    """Say what is typical of models that differ without their layers, too."""
    read = seen.read(layers)
    if read is None:
        return ""
    lacking = _residual(seen, read, layers)
    if lacking:
        return lacking
    for old, new in itertools.product(*read):
        if seen.are_like((old,), (new,)) and _is_pooled(seen, old, new, layers):
            return (
                f"They agree once {old} is zero, too, where all places have the same "
                "numbers: compare how places are put together, as in pooling (their "
                "mean, the largest, the last one), and padding"
            )
    return ""


def _residual(
    seen: Influences, read: tuple[Unit, Unit], layers: tuple[Unit, Unit]
) -> str:
    """Say that past the layers one model alone depends on some arrays."""
    sides = (
        (seen.old, read[0], layers[0], "old"),
        (seen.new, read[1], layers[1], "new"),
    )
    for one, two in itertools.permutations(sides):
        (own, more, _, name), (other, fewer, zero, lacking) = one, two
        counts = Counter(own.group[n] for n in more)
        counts.subtract(other.group[n] for n in fewer)
        groups = {group for group, count in counts.items() if count > 0}
        left = sorted(other.arrays - {*fewer, *zero})
        gone = [n for n in left if other.group[n] in groups]
        is_single = all(
            len(s.spots[n]) == 1
            for s in (own, other)
            for n in s.arrays
            if s.group[n] in groups
        )
        if gone and is_single and not any(count < 0 for count in counts.values()):
            return (
                f"Then {listing(gone, limit=3, write=str)} decides no answer of the "
                f"{lacking} model, and what is like it those of the {name} one: "
                f"typical of a residual that the {lacking} model lacks"
            )
    return ""


def _is_pooled(seen: Influences, old: str, new: str, layers: tuple[Unit, Unit]) -> bool:
    """Return whether models agree where all places have the same numbers.

    Near those numbers they differ all the same, so it is nothing that is done to each
    place alone, as an activation or a norm.
    """
    zero = (*layers[0], old), (*layers[1], new)
    if seen.apart(*zero) > seen.same:
        return False
    read = seen.read(zero)
    share = seen.share((old,), (new,), layers)
    is_other = share.apart > _MUCH_OF_ALL and not share.is_factor
    return is_other and read is not None and all(read)


def _first_entries(seen: Influences) -> str:
    """Say at which first entries of an axis the answers are the same."""
    every = zip(*seen.answers, strict=True)
    for number, (theirs, ours) in enumerate(every):
        errors = errors_of(ours, theirs)
        for axis, length in enumerate(errors.shape):
            others = tuple(n for n in range(errors.ndim) if n != axis)
            is_same = errors.max(others) <= min(seen.same, seen.whole / _FAR_FEWER)
            count = int(np.argmin(is_same)) if not is_same.all() else 0
            if count and not is_same[count:].any():
                which = f" of answer {number}" * (len(seen.answers[0]) > 1)
                return (
                    f"the answers agree at the first {count} of {length} entries "
                    f"of axis {axis}{which}: if that axis is time, the models "
                    "differ in what a position takes from those before it"
                )
    return ""


def _names(unit: Unit, joined: str = " and ") -> str:
    """Write a few names, which are quoted already."""
    return joined.join(unit)
