"""Whether a table answers right, on numbers that the search did not see.

Both models are asked with the source itself and two random sources, and with all three
times 0.05: at usual size two epsilons of a norm answer alike, and on the small numbers
of an embedding they do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.porting.matching.sides import Models, usual
from treeadapt.porting.measure import apart, require_alike
from treeadapt.trees.state_dict import from_flat_dict, to_flat_dict

SMALL = 0.05
_NUM_RANDOM = 2
USUAL_TOLERANCE = 1e-4
_ROUNDED = 1e-5  # what float32 rounds off in the answers of tiny models is far below
_TIMES = 100  # of what rounding the numbers changes: layers round, too, not they alone
_ULP = 2.0**-24
# Of a model that makes arrays of NumPy or PyTorch of what it is given.
_NOT_TRACED = TypeError, ValueError, AttributeError, RuntimeError
_NO_SLOPE = 1e-6  # of the largest; what cancels, as a bias of keys, is not exactly 0

_COMPILED_FAST = {"xla_backend_optimization_level": 0}

#: Makes arrays of the target of arrays of the source.
Convert = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far the answers of both models are apart.

    Attributes:
        usual: with numbers of usual size.
        small: with numbers times 0.05.
        depends: whether the answers depend on the numbers.
        rounding: how far the answers of one model change where its numbers are rounded
            in their last bit; asked only where that decides.
    """

    usual: float = math.inf
    small: float = math.inf
    depends: bool = False
    rounding: float = 0.0

    @property
    def largest(self) -> float:
        """The larger difference."""
        return max(self.usual, self.small)

    def is_right(self, tolerance: float) -> bool:
        """Return whether the answers are the same.

        Two kinds of GELU are 1e-4 apart, and rounding is 1e-7: what is within the usual
        tolerance must also be what rounding can do. A larger one is taken as it is.
        """
        is_rounded = self.largest <= max(_ROUNDED, _TIMES * self.rounding)
        is_near = is_rounded or tolerance > USUAL_TOLERANCE
        return self.depends and is_near and self.largest <= tolerance

    def doubt(self) -> str:
        """Say what else than rounding may be in the difference; empty if it is none."""
        if self.largest <= _ROUNDED:
            return ""
        rounding = f", and rounding changes them by {self.rounding:.1g}"
        rounding *= bool(self.rounding)
        return (
            f"the answers differ by {self.largest:.2g}{rounding}: a norm with another "
            "epsilon may change them by as little"
        )

    def text(self, tolerance: float) -> str:
        """Say why the answers are not the same."""
        if not self.depends:
            return "the answers do not depend on the numbers"
        if self.largest <= tolerance:
            return (
                f"the answers differ by {self.largest:.2g}, and rounding changes them "
                f"by {self.rounding:.1g}: the models differ a little, as in the kind "
                "of GELU. If that is meant, pass a tolerance of more than "
                f"{USUAL_TOLERANCE:.0e}"
            )
        if not math.isfinite(self.small):
            return (
                f"the answers differ by {self.usual:.2g}, and where numbers are small "
                "those of one model are NaN, infinite or other integers"
            )
        if self.usual <= tolerance:
            return (
                f"the models differ where numbers are small, by {self.small:.2g}, and "
                f"by {self.usual:.2g} at usual size: compare their epsilons"
            )
        return (
            f"all is paired, but as a whole the answers differ by {self.usual:.2g}, "
            f"and by {self.small:.2g} where numbers are small"
        )


#: What nobody has asked for yet.
UNKNOWN = Verdict()


def sources(
    models: Models, given: Mapping[str, Any], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the source, if it has numbers, and random ones."""
    rng = np.random.default_rng([seed, 1])
    if given:
        yield dict(given)
    for _ in range(_NUM_RANDOM):
        yield {path: usual(shape, rng) for path, shape in models.old.shapes.items()}


def judge(
    models: Models, given: Mapping[str, Any], convert: Convert, seed: int
) -> Verdict:
    """Compare both models on the given source and on random ones."""
    largest = [0.0, 0.0]
    seen: list[Any] = []
    for number, arrays in enumerate(sources(models, given, seed)):
        for place, size in enumerate((1.0, SMALL)):
            shown = {p: (size * x).astype("float32") for p, x in arrays.items()}
            theirs = models.called(models.old, shown)
            if number == 0 and given and not _is_finite(theirs):
                break  # numbers such as variances of zero, which nothing can be said of
            ours = models.called(
                models.new, dict(convert({**models.old.fixed, **shown}))
            )
            require_alike(ours, theirs)
            largest[place] = max(largest[place], apart(ours, theirs))
            seen += [theirs] * (place == 0)
    depends = any(apart(one, seen[-1]) > 0 for one in seen[:-1])
    rounding = 0.0
    if _ROUNDED < max(largest) <= USUAL_TOLERANCE:
        rng = np.random.default_rng([seed, 3])
        rounded = {p: _rounded(x, rng) for p, x in arrays.items()}
        rounding = apart(models.called(models.old, rounded), seen[-1])
    return Verdict(largest[0], largest[1], depends, rounding)


def _rounded(array: Any, rng: np.random.Generator) -> np.ndarray:
    """Return numbers that are rounded up or down in their last bit."""
    signs = rng.choice([-_ULP, _ULP], size=array.shape)
    return (array.astype("float32") * (1 + signs)).astype("float32")


def _is_finite(answers: list[np.ndarray]) -> bool:
    return all(not np.isnan(array).any() for array in answers)


def unseen(
    models: Models, target: Any, model: Callable[[Any], Any], arrays: Mapping[str, Any]
) -> dict[str, float]:
    """Return the share of each leaf of the target that influences no answer.

    One backward pass says it if the model can be traced; else parts of each leaf get
    other numbers.
    """
    try:
        slopes = _slopes(models, target, model, arrays)
    except _NOT_TRACED:
        return dict(_by_halves(models, arrays))
    least = _NO_SLOPE * max(np.max(x, initial=0) for x in slopes.values())
    shares = {
        path: float(np.mean(x == 0)) if np.max(x, initial=0) > least else 1.0
        for path, x in slopes.items()
    }
    return {path: share for path, share in shares.items() if share}


def _slopes(
    models: Models, target: Any, model: Callable[[Any], Any], arrays: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return how much each number of the target influences the answers."""
    is_flat = type(target) is dict and target.keys() == to_flat_dict(target).keys()

    def summed(moving: Any) -> Any:
        leaves = {**models.new.fixed, **moving}
        answers = model(leaves if is_flat else from_flat_dict(target, leaves))
        total = jnp.zeros(())
        for number, answer in enumerate(jax.tree.leaves(answers)):
            keys = jax.random.key(number)
            weights = jax.random.normal(keys, answer.shape)
            finite = jnp.where(jnp.isfinite(answer), answer, 0.0)
            total = total + jnp.sum(weights * finite)
        return total

    models.evaluations += 1
    shown = {path: jnp.asarray(arrays[path], "float32") for path in models.new.shapes}
    # Compiling is what takes long, of a program that runs once.
    slope = jax.jit(jax.grad(summed), compiler_options=_COMPILED_FAST)
    slopes = slope(shown)
    return {path: np.abs(np.nan_to_num(x, nan=1.0)) for path, x in slopes.items()}


def _by_halves(
    models: Models, arrays: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yield leaves of which parts along the first axis influence no answer."""
    moving = {path: np.asarray(arrays[path]) for path in models.new.shapes}
    wanted = models.called(models.new, moving)
    rng = np.random.default_rng(0)

    def hidden(path: str, start: int, stop: int, axis: int) -> int:
        changed = moving[path].copy()
        part = (slice(None),) * axis + (slice(start, stop),)
        changed[part] *= np.exp(rng.normal(size=changed[part].shape))
        changed[part] += 0.1
        ours = models.called(models.new, {**moving, path: changed})
        if all(map(np.array_equal, ours, wanted)):
            return stop - start
        if stop - start == 1:
            return 0
        middle = (start + stop) // 2
        parts = ((start, middle), (middle, stop))
        return sum(hidden(path, *part, axis) for part in parts)

    for path, array in moving.items():
        axis = int(np.argmax(array.shape)) if array.ndim else 0
        size = array.shape[axis] if array.ndim else 1
        if array.ndim and (share := hidden(path, 0, size, axis) / size):
            yield path, share
