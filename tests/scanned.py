"""Small transformers whose layers are inside a scan, each with its unrolled twin.

Every row of ``TWINS`` holds one model twice, with the same numbers: stacked, so that
each array below ``blocks`` has an axis of layers, and unrolled, with arrays of its own
for every layer. All sizes are different primes, so no axis passes for another. ``Axis``
rows say where the layers are; they are the slow reference for ``stacks=``, which
``Twin.unroll`` and ``Twin.stack`` follow and treeadapt does not know.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

import treeadapt as ta

LAYERS, WIDTH, HIDDEN, WORDS, CLASSES, EXPERTS, MEMBERS = 5, 7, 13, 11, 17, 2, 3
INNER = 19  # of attention
TOKENS = np.array([[1, 4, 9], [2, 2, 10]])

#: Paths are ``{path: array}``; static leaves of a model are not among them.
Flat = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of layers.

    Attributes:
        key: stored path of the node below which every array has it.
        axis: its place in the stored arrays.
        template: path of one layer of the node in the unrolled model.
        besides: stored paths of nodes below that do not have it.
    """

    key: str
    axis: int = 0
    template: str = ""
    besides: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        return _under(path, self.key) and not any(
            _under(path, node) for node in self.besides
        )

    def layer_path(self, path: str, number: int | str) -> str:
        rest = path[len(self.key) :].lstrip("/")
        template = self.template or f"{self.key}/{{l}}".lstrip("/")
        return "/".join(filter(None, [template.replace("{l}", str(number)), rest]))


def read_key(key: str) -> tuple[str, dict[str, list[int]]]:
    """Read the path of an array, and which layers of each stack a key names.

    Example:
        >>> read_key("blocks/{{0..1},{4}}@1/kernel")
        ('blocks/kernel', {'blocks': [0, 1, 4]})
    """
    path: list[str] = []
    layers: dict[str, list[int]] = {}
    for segment in key.split("/"):
        runs = re.findall(r"{([0-9]+)(?:\.\.([0-9]+))?}", segment)
        if not runs:
            path.append(segment)
            continue
        layers["/".join(path)] = [
            number
            for first, last in runs
            for number in range(int(first), int(last or first) + 1)
        ]
    return "/".join(path), layers


@dataclasses.dataclass(frozen=True)
class Twin:
    """One model, scanned and unrolled.

    Attributes:
        name: of the library and of how it stacks; the test id.
        scanned: makes the scanned model; equal numbers on each call.
        unrolled_shape: makes a model with the structure of the unrolled one.
        stacks: what a user gives as ``stacks=``.
        axes: the same, outermost first, for the reference.
        forward: output of the scanned model. forward_unrolled: of the unrolled one.
        kernel: last segment of the paths of kernels.
    """

    name: str
    scanned: Callable[[], Any]
    unrolled_shape: Callable[[], Any]
    stacks: Mapping[str, Any]
    axes: tuple[Axis, ...]
    forward: Callable[[Any], jax.Array]
    forward_unrolled: Callable[[Any], jax.Array]
    kernel: str = "kernel"

    def unrolled(self) -> Any:
        """The unrolled model, with the numbers of the scanned one."""
        return self.unroll_tree(self.scanned())

    @functools.cached_property
    def _unrolled_rest(self) -> Any:
        return ta.split(self.unrolled_shape(), arrays="all")[1]

    def places(self, flat: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple]]:
        """Yield a key, the path of one of its layers, and where that is in the array.

        Args:
            flat: arrays by stored path, or by the name of some layers of one.
        """
        for key, array in flat.items():
            path, layers = read_key(key)
            axes = [axis for axis in self.axes if axis.covers(path)]
            numbers = [layers.get(a.key, range(array.shape[a.axis])) for a in axes]
            for places in itertools.product(*map(enumerate, numbers)):
                layer_path, index = path, [slice(None)] * np.ndim(array)
                for axis, (place, number) in reversed(
                    [*zip(axes, places, strict=True)]
                ):
                    layer_path = axis.layer_path(layer_path, number)
                    index[axis.axis] = place
                yield key, layer_path, tuple(index)

    def at(self, layers: str, rest: str = "") -> str:
        """The pattern of some layers of the outermost stack, and of what is below."""
        above = self.axes[0].layer_path(self.axes[0].key, layers)
        return f"{above}/{rest}" if rest else above

    def unroll(self, flat: Flat) -> Flat:
        """The flat dict of the unrolled model from that of the scanned one."""
        numbers = {path: np.asarray(leaf) for path, leaf in flat.items()}
        return {
            layer: jnp.asarray(numbers[path][index])
            for path, layer, index in self.places(numbers)
        }

    def unroll_shapes(self, flat: Flat) -> Flat:
        """The same, of shapes."""
        numbers = {path: np.empty(leaf.shape, bool) for path, leaf in flat.items()}
        return {
            layer: jax.ShapeDtypeStruct(numbers[path][index].shape, flat[path].dtype)
            for path, layer, index in self.places(numbers)
        }

    def stack(self, flat: Flat, like: Flat) -> Flat:
        """The flat dict of the scanned model from that of the unrolled one.

        Args:
            flat: ``{path: array}`` of the unrolled model.
            like: flat dict of the scanned model, for its shapes.
        """
        found = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in like.items()}
        for path, layer, index in self.places(like):
            found[path][index] = flat[layer]
        return {path: jnp.asarray(array) for path, array in found.items()}

    def unroll_tree(self, tree: Any) -> Any:
        """The unrolled model with the numbers of a scanned one."""
        return ta.merge(self.unroll(arrays(tree)), self._unrolled_rest)

    def stack_tree(self, tree: Any) -> Any:
        """The scanned model with the numbers of an unrolled one."""
        flat, rest = ta.split(self.scanned(), arrays="all")
        return ta.merge(self.stack(arrays(tree), flat), rest)


def arrays(tree: Any) -> Flat:
    """The arrays of a tree, by path."""
    return ta.split(tree, arrays="all")[0]


def _twin(name: str, shape: Callable[[], Any], *rest: Any, **more: Any) -> Twin:
    """Make a row of a scanned model that is given by its shapes; fill it once."""

    @functools.cache
    def filled() -> tuple[Any, Flat]:
        random = np.random.default_rng(1)
        flat, model = ta.split(shape(), arrays="all")
        return model, {
            path: jnp.asarray(random.normal(size=leaf.shape) / 2, leaf.dtype)
            for path, leaf in flat.items()
        }

    def make() -> Any:
        model, flat = filled()
        return ta.merge(flat, model)

    return Twin(name, make, *rest, **more)


def _under(path: str, node: str) -> bool:
    return not node or path == node or path.startswith(node + "/")


def _attend(qkv: jax.Array) -> jax.Array:
    query, key, value = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", query, key) / INNER**0.5
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), value)


# Linen.


def _init(init: Callable[..., Any], names: tuple[str, ...], boxes: Any) -> Any:
    return init if boxes is None else boxes(init, names)


class LinenBlock(nn.Module):
    boxes: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        def dense(name: str, size: int, axes: tuple[str, str], *, bias: bool) -> Any:
            kernel = _init(nn.initializers.lecun_normal(), axes, self.boxes)
            shift = _init(nn.initializers.normal(), axes[1:], self.boxes)
            return nn.Dense(
                size, use_bias=bias, kernel_init=kernel, bias_init=shift, name=name
            )

        norm = nn.LayerNorm(
            scale_init=_init(nn.initializers.normal(1.0), ("embed",), self.boxes),
            bias_init=_init(nn.initializers.normal(), ("embed",), self.boxes),
            name="norm",
        )
        qkv = dense("attn_qkv", 3 * INNER, ("embed", "heads"), bias=False)
        x += dense("attn_out", WIDTH, ("heads", "embed"), bias=False)(
            _attend(qkv(norm(x)))
        )
        h = jax.nn.gelu(dense("mlp_wi", HIDDEN, ("embed", "mlp"), bias=True)(x))
        return x + dense("mlp_wo", WIDTH, ("mlp", "embed"), bias=True)(h), None


class LinenModel(nn.Module):
    axis: int | None = 0  # None: unrolled
    boxes: Any = None
    metadata: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(WORDS, WIDTH, name="embed")(tokens)
        if self.axis is None:
            for number in range(LAYERS):
                x, _ = LinenBlock(self.boxes, name=f"blocks_{number}")(x)
        else:
            scan = nn.scan(
                LinenBlock,
                variable_axes={"params": self.axis},
                split_rngs={"params": True},
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: "layers"} if self.metadata else {},
            )
            x, _ = scan(self.boxes, name="blocks")(x)
        return nn.Dense(CLASSES, name="head")(x)


def _linen(name: str, axis: int, boxes: Any = None, *, by_name: bool = False) -> Twin:
    scanned = LinenModel(axis, boxes, metadata=boxes is not None)
    unrolled = LinenModel(None, boxes)
    template = "params/blocks_{l}"

    def shape(model: LinenModel) -> Any:
        return jax.eval_shape(model.init, jax.random.key(1), TOKENS)

    return _twin(
        name,
        functools.partial(shape, scanned),
        functools.partial(shape, unrolled),
        {"params/blocks": (template, "layers" if by_name else axis)},
        (Axis("params/blocks", axis, template),),
        lambda variables: scanned.apply(variables, TOKENS),
        lambda variables: unrolled.apply(variables, TOKENS),
    )


# nnx.


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, boxes: Any = None):
        def linear(sizes: Any, names: tuple[str, str], *, bias: bool) -> nnx.Linear:
            kernel = _init(nnx.initializers.lecun_normal(), names, boxes)
            shift = _init(nnx.initializers.normal(), names[1:], boxes)
            return nnx.Linear(
                *sizes, use_bias=bias, kernel_init=kernel, bias_init=shift, rngs=rngs
            )

        self.norm = nnx.LayerNorm(
            WIDTH,
            scale_init=_init(nnx.initializers.normal(1.0), ("embed",), boxes),
            bias_init=_init(nnx.initializers.normal(), ("embed",), boxes),
            rngs=rngs,
        )
        self.qkv = linear((WIDTH, 3 * INNER), ("embed", "heads"), bias=False)
        self.out = linear((INNER, WIDTH), ("heads", "embed"), bias=False)
        self.wi = linear((WIDTH, HIDDEN), ("embed", "mlp"), bias=True)
        self.wo = linear((HIDDEN, WIDTH), ("mlp", "embed"), bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.out(_attend(self.qkv(self.norm(x))))
        return x + self.wo(jax.nn.gelu(self.wi(x)))


class NnxModel(nnx.Module):
    def __init__(self, axis: int | None, boxes: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        if axis is None:
            self.blocks = nnx.List([NnxBlock(rngs, boxes) for _ in range(LAYERS)])
        else:
            metadata = _nnx_metadata(boxes)
            axes = nnx.StateAxes({nnx.Param: axis, ...: 0})
            make = nnx.vmap(
                functools.partial(NnxBlock, boxes=boxes),
                out_axes=axes,
                transform_metadata=metadata,
            )
            self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)


def _nnx_metadata(boxes: Any) -> dict[str, str]:
    return {} if boxes is None else {nnx.PARTITION_NAME: "layers"}


def _nnx_forward(model: NnxModel, axis: int, boxes: Any) -> jax.Array:
    step = nnx.scan(
        lambda block, x: block(x),
        in_axes=(nnx.StateAxes({nnx.Param: axis, ...: 0}), nnx.Carry),
        out_axes=nnx.Carry,
        transform_metadata=_nnx_metadata(boxes),
    )
    return model.head(step(model.blocks, model.embed(jnp.asarray(TOKENS))))


def _nnx_forward_unrolled(model: NnxModel) -> jax.Array:
    x = model.embed(jnp.asarray(TOKENS))
    for block in model.blocks:
        x = block(x)
    return model.head(x)


def _nnx(name: str, axis: int, boxes: Any = None, *, by_name: bool = False) -> Twin:
    def shape(axis: int | None) -> Any:
        return nnx.eval_shape(lambda: NnxModel(axis, boxes, nnx.Rngs(1)))

    return _twin(
        name,
        functools.partial(shape, axis),
        functools.partial(shape, None),
        {"blocks": "layers" if by_name else axis},
        (Axis("blocks", axis),),
        lambda model: _nnx_forward(model, axis, boxes),
        _nnx_forward_unrolled,
    )


def nnx_boxes(init: Callable[..., Any], names: tuple[str, ...]) -> Any:
    # The names are logical ones: no mesh has to have them.
    return nnx.with_metadata(init, out_sharding=names, eager_sharding=False)


# Equinox.


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    wi: eqx.nn.Linear
    wo: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array):
        self.activation = jax.nn.gelu
        keys = jax.random.split(key, 4)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * INNER, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(INNER, WIDTH, use_bias=False, key=keys[1])
        self.wi = eqx.nn.Linear(WIDTH, HIDDEN, key=keys[2])
        self.wo = eqx.nn.Linear(HIDDEN, WIDTH, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        each = functools.partial(functools.reduce, lambda f, _: jax.vmap(f), range(2))
        x += each(self.out)(_attend(each(lambda x: self.qkv(self.norm(x)))(x)))
        return x + each(lambda x: self.wo(self.activation(self.wi(x))))(x)


class EqxModel(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Any
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array, *, scanned: bool):
        embed, blocks, head = jax.random.split(key, 3)
        keys = jax.random.split(blocks, LAYERS)
        self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=embed)
        self.blocks = (
            eqx.filter_vmap(EqxBlock)(keys) if scanned else [EqxBlock(k) for k in keys]
        )
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=head)


def _eqx_forward(model: EqxModel) -> jax.Array:
    x = model.embed.weight[TOKENS]
    if isinstance(model.blocks, list):
        for block in model.blocks:
            x = block(x)
    else:
        layers, static = eqx.partition(model.blocks, eqx.is_array)
        x, _ = jax.lax.scan(
            lambda x, layer: (eqx.combine(layer, static)(x), None), x, layers
        )
    return jax.vmap(jax.vmap(model.head))(x)


def _eqx_shape(*, scanned: bool) -> EqxModel:
    return eqx.filter_eval_shape(EqxModel, jax.random.key(1), scanned=scanned)


# Plain dicts: layers and experts, and a whole ensemble.


def nested(flat: Flat) -> Any:
    """Plain dicts with lists where all keys are numbers."""

    def lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        children = {key: lists(child) for key, child in node.items()}
        if all(key.isdigit() for key in children):
            return [children[str(number)] for number in range(len(children))]
        return children

    return lists(traverse_util.unflatten_dict(flat, sep="/"))


EXPERT_SHAPES = {
    "embed": (WORDS, WIDTH),
    "blocks/norm/scale": (LAYERS, WIDTH),
    "blocks/router/kernel": (LAYERS, WIDTH, EXPERTS),
    "blocks/frequencies": (WIDTH,),  # one for all layers
    "blocks/experts/wi/kernel": (LAYERS, EXPERTS, WIDTH, HIDDEN),
    "blocks/experts/wi/bias": (LAYERS, EXPERTS, HIDDEN),
    "blocks/experts/wo/kernel": (LAYERS, EXPERTS, HIDDEN, WIDTH),
    "head/kernel": (WIDTH, CLASSES),
    "head/bias": (CLASSES,),
}


def _mixture(x: jax.Array, layer: Any, frequencies: jax.Array, experts: Any) -> Any:
    """One layer; ``experts`` gives the sum of all experts' outputs."""
    x += jnp.sin(x * frequencies) * layer["norm"]["scale"]
    gates = jax.nn.softmax(x @ layer["router"]["kernel"])
    return x + experts(x, gates, layer["experts"])


def _one_expert(x: jax.Array, expert: Any) -> jax.Array:
    hidden = jax.nn.gelu(x @ expert["wi"]["kernel"] + expert["wi"]["bias"])
    return hidden @ expert["wo"]["kernel"]


def _stacked_experts(x: jax.Array, gates: jax.Array, experts: Any) -> jax.Array:
    outputs = jax.vmap(_one_expert, in_axes=(None, 0))(x, experts)
    return jnp.einsum("ebtd,bte->btd", outputs, gates)


def _listed_experts(x: jax.Array, gates: jax.Array, experts: Any) -> jax.Array:
    outputs = [_one_expert(x, expert) for expert in experts]
    return sum(out * gates[..., [n]] for n, out in enumerate(outputs))


def _dict_forward(model: Any) -> jax.Array:
    x, blocks = model["embed"][TOKENS], dict(model["blocks"])
    frequencies = blocks.pop("frequencies")

    def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return _mixture(x, layer, frequencies, _stacked_experts), None

    x, _ = jax.lax.scan(step, x, blocks)
    return x @ model["head"]["kernel"] + model["head"]["bias"]


def _dict_forward_unrolled(model: Any) -> jax.Array:
    x, frequencies = model["embed"][TOKENS], model["blocks"]["frequencies"]
    for number in range(LAYERS):
        layer = model["blocks"][str(number)]
        x = _mixture(x, layer, frequencies, _listed_experts)
    return x @ model["head"]["kernel"] + model["head"]["bias"]


ENSEMBLE_SHAPES = {
    "wi/kernel": (WIDTH, HIDDEN, MEMBERS),
    "wi/bias": (HIDDEN, MEMBERS),
    "wo/kernel": (HIDDEN, CLASSES, MEMBERS),
}


def _member(model: Any) -> jax.Array:
    x = jnp.asarray(np.eye(3, WIDTH), jnp.float32)
    return (
        jnp.tanh(x @ model["wi"]["kernel"] + model["wi"]["bias"])
        @ model["wo"]["kernel"]
    )


def _plain(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    stacks: Mapping[str, Any],
    axes: tuple[Axis, ...],
    *forward: Callable[[Any], jax.Array],
) -> Twin:
    flat = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()}
    reference = Twin(name, dict, dict, stacks, axes, *forward)
    return _twin(
        name,
        lambda: nested(flat),
        lambda: nested(reference.unroll_shapes(flat)),
        stacks,
        axes,
        *forward,
    )


TWINS = (
    _linen("Linen", 0),
    _linen("Linen, axis 1", 1),
    _linen("Linen, boxes", 0, nn.with_partitioning, by_name=True),
    _linen("Linen, boxes, axis 1", 1, nn.with_partitioning, by_name=True),
    _linen("Linen, logical boxes", 0, nn.with_logical_partitioning, by_name=True),
    _nnx("nnx", 0),
    _nnx("nnx, axis 1", 1),
    _nnx("nnx, metadata", 0, nnx_boxes, by_name=True),
    _nnx("nnx, metadata, axis 1", 1, nnx_boxes, by_name=True),
    _twin(
        "Equinox",
        functools.partial(_eqx_shape, scanned=True),
        functools.partial(_eqx_shape, scanned=False),
        {"blocks": 0},
        (Axis("blocks"),),
        _eqx_forward,
        _eqx_forward,
        kernel="weight",
    ),
    _plain(
        "dict of experts",
        EXPERT_SHAPES,
        {"blocks": 0, "blocks/frequencies": None, "blocks/experts": 1},
        (Axis("blocks", besides=("blocks/frequencies",)), Axis("blocks/experts", 1)),
        _dict_forward,
        _dict_forward_unrolled,
    ),
    _plain(
        "ensemble",
        ENSEMBLE_SHAPES,
        {"": -1},
        (Axis("", -1),),
        jax.vmap(_member, in_axes=-1),
        lambda models: jnp.stack([_member(model) for model in models]),
    ),
)

#: Few leaves and shapes, for what runs many transformations.
SMALL = _plain(
    "small",
    {
        "embed": (WIDTH,),
        "blocks/scale": (LAYERS, WIDTH),
        "blocks/experts/w": (LAYERS, EXPERTS, WIDTH, 3),
    },
    {"blocks": 0, "blocks/experts": 1},
    (Axis("blocks"), Axis("blocks/experts", 1)),
    lambda model: model["embed"],
    lambda model: model["embed"],
)

BY_NAME = {twin.name: twin for twin in (*TWINS, SMALL)}
